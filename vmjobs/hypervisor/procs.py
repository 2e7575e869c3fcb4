"""Finding and ending processes of this user, whoever started them.

A machine may outlive the agent that started it, so nothing here relies on being the parent.
Processes are held by pidfd, so that a number used again is never taken for the old process.
"""

# There may be thousands of processes, and each machine's end means a look at all of them. Path takes
# five times as long for that.
# ruff: noqa: PTH115, PTH116, PTH208

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vmjobs.errors import HypervisorError

#: Seconds from one try to look at processes to the next.
TICK = 0.1
#: Seconds from one look at a machine to the next, until all of its processes are known.
LOOK_SECONDS = 0.3
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
    def program(self) -> str:
        """What it is called where it shows a command line, without its directory."""
        return self.argv[0].rpartition("/")[2] if self.argv else ""

    @property
    def leads(self) -> bool:
        """True for the first process of its session."""
        return self.pid == self.session


class _Scans:
    """The last scan. It serves all callers that asked before it began: many VMs may end at once.

    began: when, in seconds of the monotonic clock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = -math.inf
        self._found: tuple[Process, ...] = ()

    def get(self) -> tuple[Process, ...]:
        """The processes at a moment after this call."""
        asked = time.monotonic()
        with self._lock:
            if self._began < asked:
                began = time.monotonic()
                self._found, self._began = tuple(_scan()), began
            return self._found


_SCANS: Final = _Scans()


def scan() -> tuple[Process, ...]:
    """All living processes of this user that show a command line, but for other user namespaces.

    A guest may control the processes in such a namespace and give them any command line. They are found
    as descendants of the process that started them.

    Raises:
        HypervisorError: the processes cannot be read.
    """
    return _SCANS.get()


def _scan() -> Iterator[Process]:
    uid, ours, everyone = os.getuid(), os.readlink("/proc/self/ns/user"), []
    with _Looking():
        everyone = [name for name in os.listdir("/proc") if name.isdigit()]
    for name in everyone:
        found, entry = None, f"/proc/{name}"
        with _Looking():
            if os.stat(entry).st_uid == uid and os.readlink(f"{entry}/ns/user") == ours:
                found = read(int(name))
        if found and found.argv:
            yield found


def read(pid: int) -> Process | None:
    """What ``/proc`` says about a process; ``None`` if it has ended. Raises as :func:`scan`."""
    stat = None
    with _Looking():
        words = _content(f"/proc/{pid}/cmdline")
        stat = _content(f"/proc/{pid}/stat")
    if stat is None:
        return None
    # The second field, the name, may hold anything but is followed by the last ')'.
    fields = stat.rpartition(b")")[2].split()
    state, session = fields[0], int(fields[3])
    if state in {b"Z", b"X"}:
        return None
    shown = words.rstrip(b"\0")
    argv = tuple(shown.decode("utf-8", "replace").split("\0")) if shown else ()
    return Process(pid, session, argv, stopped=state in {b"T", b"t"})


def _content(path: str) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = [os.read(handle, 65536)]
        while len(pieces[-1]) == 65536:
            pieces.append(os.read(handle, 65536))
        return b"".join(pieces)
    finally:
        os.close(handle)


def children(pid: int) -> list[int]:
    """The living children of a process, of all of its threads. Raises as :func:`scan`."""
    found: list[int] = []
    with _Looking():
        for task in os.listdir(f"/proc/{pid}/task"):
            with _Looking():
                found += [int(word) for word in _content(f"/proc/{pid}/task/{task}/children").split()]
    return found


def threads(pid: int) -> int:
    """How many threads a process has; 0: it has ended. Raises as :func:`scan`."""
    with _Looking():
        return len(os.listdir(f"/proc/{pid}/task"))
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
    """Kill the processes that ``find`` finds, until it finds none.

    Raises:
        HypervisorError: a search that began after ``timeout`` seconds found one, or failed.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() > deadline
        try:
            if not (found := find()):
                return
            with held(found) as handles:
                _kill(handles, max(deadline, time.monotonic() + TICK))
            left = "pid " + ", ".join(str(process.pid) for process in found)
        except HypervisorError as error:
            left = error.message
            time.sleep(TICK)  # too many open files, for one: nothing tells when that is over
        if late:
            raise HypervisorError(f"{what} is not gone {timeout:g} s after SIGKILL: {left}")
