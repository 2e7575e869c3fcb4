"""Finding and ending processes of this user, whoever started them.

A machine may outlive the agent that started it, so nothing here relies on being the parent.
Processes are held by pidfd, so that a number used again is never taken for the old process.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vmjobs.errors import HypervisorError

#: Seconds from one try to look at processes to the next.
TICK = 0.1
#: What tells that a process has ended, or is none of ours. That this process cannot look, as it has no
#: file or memory left, says nothing of anybody.
GONE: Final = (FileNotFoundError, ProcessLookupError, PermissionError)


class _Looking:
    """Whoever is gone is not found."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        """Raises HypervisorError: it cannot."""
        if isinstance(error, GONE):
            return True
        if isinstance(error, OSError):
            raise HypervisorError(f"cannot look at processes: {error.strerror}") from error
        return False


@dataclass(frozen=True)
class Process:
    """A living process: one that has ended but was not reaped yet does not count.

    argv: empty where it shows none: it is about to end, or wants to pass for that.
    """

    pid: int
    session: int
    argv: tuple[str, ...]
    stopped: bool

    @property
    def leads(self) -> bool:
        """True for the first process of its session."""
        return self.pid == self.session


def scan() -> Iterator[Process]:
    """All processes of this user that live now and show a command line, but for those within a user
    namespace of their own.

    What is in there may be in the hands of a guest, and give itself any command line. It is found as a
    descendant of what started it.

    Raises:
        HypervisorError: they cannot be looked at.
    """
    uid, ours = os.getuid(), Path("/proc/self/ns/user").readlink()
    with _Looking(), os.scandir("/proc") as entries:
        everyone = [entry for entry in entries if entry.name.isdigit()]
    for entry in everyone:
        found = None
        with _Looking():
            mine = entry.stat(follow_symlinks=False).st_uid == uid
            if mine and Path(f"/proc/{entry.name}/ns/user").readlink() == ours:
                found = read(int(entry.name))
        if found and found.argv:
            yield found


def read(pid: int) -> Process | None:
    """What ``/proc`` says about a process; ``None`` if it has ended. Raises as :func:`scan`."""
    stat = None
    with _Looking():
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    if stat is None:
        return None
    # The second field, the name, may hold anything but is followed by the last ')'.
    fields = stat.rpartition(")")[2].split()
    state, session = fields[0], int(fields[3])
    if state in {"Z", "X"}:
        return None
    shown = words.rstrip(b"\0")
    argv = tuple(word.decode("utf-8", "replace") for word in shown.split(b"\0")) if shown else ()
    return Process(pid, session, argv, stopped=state in {"T", "t"})


def children(pid: int) -> list[int]:
    """The living children of a process, of all of its threads. Raises as :func:`scan`."""
    found: list[int] = []
    with _Looking():
        for task in Path(f"/proc/{pid}/task").iterdir():
            with _Looking():
                found += [int(word) for word in (task / "children").read_text().split()]
    return found


def threads(pid: int) -> int:
    """How many threads a process has; 0: it has ended. Raises as :func:`scan`."""
    with _Looking():
        return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
    return 0


def is_traced(pid: int) -> bool | None:
    """Whether another process traces this one (proc(5), ``TracerPid``); None: it has ended.

    Raises as :func:`scan`.
    """
    with _Looking():
        status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        return None if status["State"][0] in "ZX" else status["TracerPid"] != "0"
    return None


def birth_of(pid: int, proc: Path = Path("/proc")) -> int:
    """When a process began, in ticks since the node did (proc(5), ``starttime``); 0: there is none.

    Raises:
        OSError: nobody can look.
    """
    try:
        stat = (proc / str(pid) / "stat").read_text("utf-8", "replace")
    except GONE:
        return 0
    return int(stat[stat.rindex(")") + 2 :].split()[19])


def wait_for_any(processes: Sequence[Process], beside: Sequence[int], timeout: float) -> bool:
    """Block until one of these processes has ended, or one of the handles is readable.

    Returns:
        Whether one of the handles is.
    """
    with held(list(processes)) as handles:
        if len(handles) < len(processes):
            timeout = 0.0  # one has ended since it was found
        return not set(beside).isdisjoint(readable([*handles, *beside], timeout))


def wait_stopped(pid: int, timeout: float) -> None:
    """Return once a process that was sent SIGSTOP has stopped (or ended).

    The kernel tells a parent only, which we need not be; it is a matter of microseconds.

    Raises:
        HypervisorError: it goes on after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while (process := read(pid)) and not process.stopped:
        if time.monotonic() > deadline:
            raise HypervisorError(f"process {pid} does not stop")
        os.sched_yield()


def readable(handles: list[int], timeout: float) -> list[int]:
    """Those of ``handles`` that are readable (for a pidfd: ended) within ``timeout`` seconds."""
    poller = select.poll()
    for handle in handles:
        poller.register(handle, select.POLLIN)
    return [handle for handle, _ in poller.poll(max(0, round(timeout * 1000)))]


@contextmanager
def held(processes: list[Process]) -> Iterator[list[int]]:
    """Handles (pidfds) of those that live, by which they are known whatever they do. Raises as
    :func:`scan`.
    """
    with ExitStack() as stack:
        handles = []
        for process in processes:
            with _Looking():
                handle = os.pidfd_open(process.pid)
                stack.callback(os.close, handle)
                if read(process.pid) is not None:
                    handles.append(handle)
        yield handles


def kill_held(handles: list[int], timeout: float, what: str) -> None:
    """Kill them, and wait until they have ended.

    Raises:
        HypervisorError: if one is still there after ``timeout`` seconds.
    """
    if not _kill(handles, time.monotonic() + timeout):
        raise HypervisorError(f"{what} is not gone {timeout:g} s after SIGKILL")


def _kill(handles: list[int], deadline: float) -> bool:
    """Kill them; whether all have ended by then."""
    for handle in handles:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    return all(readable([handle], deadline - time.monotonic()) for handle in handles)


def kill_all(find: Callable[[], list[Process]], timeout: float, what: str) -> None:
    """Kill what ``find`` finds, again and again, until it finds nothing.

    Raises:
        HypervisorError: if something is still there after ``timeout`` seconds, or nobody could look.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            if not (found := find()):
                return
            with held(found) as handles:
                _kill(handles, deadline)
            left = "pid " + ", ".join(str(process.pid) for process in found)
        except HypervisorError as error:
            left = error.message
            time.sleep(TICK)  # too many open files, for one: nothing tells when that is over
        if time.monotonic() > deadline:
            raise HypervisorError(f"{what} is not gone {timeout:g} s after SIGKILL: {left}")
