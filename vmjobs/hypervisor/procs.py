"""Finds and ends processes of this user, whichever process started them.

A VM may outlive the agent that started it, so nothing here relies on being the parent. Processes
are identified by pidfd, so that a reused number is never mistaken for the old process.
"""

# There may be thousands of processes, and each VM's end means a scan of all of them. Path takes
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

#: Seconds from one try to read processes to the next.
RETRY_SECONDS = 0.1
#: Seconds from one look at a VM to the next, until all of its processes are known.
POLL_SECONDS = 0.3
#: Errors that mean that a process has ended, or belongs to another user. Other errors, such as too
#: many open files, say nothing about the process.
GONE_ERRORS: Final = (FileNotFoundError, ProcessLookupError, PermissionError)


class _ProcAccess:
    """Ignores that a process is gone; turns other errors into HypervisorError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        """Raise HypervisorError if the processes cannot be read."""
        if isinstance(error, GONE_ERRORS):
            return True
        if isinstance(error, OSError):
            raise HypervisorError(f"cannot look at processes: {error.strerror}") from error
        return False


@dataclass(frozen=True)
class Process:
    """A living process; a process that has ended and is not reaped yet is not living.

    argv: empty if it shows none: it is about to end, or pretends to be.
    """

    pid: int
    session: int
    argv: tuple[str, ...]
    stopped: bool

    @property
    def program(self) -> str:
        """Name of its program in its command line, without the directory."""
        return self.argv[0].rpartition("/")[2] if self.argv else ""

    @property
    def is_leader(self) -> bool:
        return self.pid == self.session


class _ScanCache:
    """The last scan. It serves all callers that asked before it began.

    This saves scans when many VMs end at once. began: its start, in monotonic seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = -math.inf
        self._found: tuple[Process, ...] = ()

    def get(self) -> tuple[Process, ...]:
        """Return the processes at a moment after this call."""
        asked = time.monotonic()
        with self._lock:
            if self._began < asked:
                began = time.monotonic()
                self._found, self._began = tuple(_scan()), began
            return self._found


_SCAN_CACHE: Final = _ScanCache()


def scan() -> tuple[Process, ...]:
    """List this user's living processes with a command line, in this user namespace.

    A guest may control the processes in another user namespace and give them any command line. They
    are found as descendants of the process that started them.

    Raises:
        HypervisorError: the processes cannot be read.
    """
    return _SCAN_CACHE.get()


def _scan() -> Iterator[Process]:
    ours = os.readlink("/proc/self/ns/user")
    return (process for process in processes_of(os.getuid(), ours) if process.argv)


def processes_of(uid: int, namespace: str = "") -> Iterator[Process]:
    """Yield the living processes of a user. Raises as :func:`scan`.

    namespace: of users, as the link ``ns/user`` names it; empty: any.
    """
    everyone = []
    with _ProcAccess():
        everyone = [name for name in os.listdir("/proc") if name.isdigit()]
    for name in everyone:
        found, entry = None, f"/proc/{name}"
        with _ProcAccess():
            is_ours = os.stat(entry).st_uid == uid
            if is_ours and (not namespace or os.readlink(f"{entry}/ns/user") == namespace):
                found = read(int(name))
        if found:
            yield found


def read(pid: int) -> Process | None:
    """Read a process from ``/proc``; None if it has ended. Raises as :func:`scan`."""
    fields: list[bytes] = []
    with _ProcAccess():
        words = _content(f"/proc/{pid}/cmdline")
        fields = stat_fields(pid)
    if not fields:
        return None
    state, session = fields[0], int(fields[3])
    if state in {b"Z", b"X"}:
        return None
    shown = words.rstrip(b"\0")
    argv = tuple(shown.decode("utf-8", "replace").split("\0")) if shown else ()
    return Process(pid, session, argv, stopped=state in {b"T", b"t"})


def stat_fields(pid: int, proc: Path = Path("/proc")) -> list[bytes]:
    """The fields of a process's ``stat`` (proc(5)) from the third one, its state. Raises OSError."""
    # The second field, the name, may hold anything but is followed by the last ')'.
    return _content(f"{proc}/{pid}/stat").rpartition(b")")[2].split()


def status_fields(pid: int, proc: Path = Path("/proc")) -> dict[str, str]:
    """The fields of a process's ``status`` (proc(5)), by name. Raises OSError.

    The process's name may hold other characters that end a line for ``str.splitlines``.
    """
    lines = _content(f"{proc}/{pid}/status").decode("utf-8", "replace").split("\n")
    return dict(line.partition(":\t")[::2] for line in lines)


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
    """The living children of all threads of a process. Raises as :func:`scan`."""
    found: list[int] = []
    with _ProcAccess():
        for task in threads(pid):
            with _ProcAccess():
                found += [int(word) for word in _content(f"/proc/{pid}/task/{task}/children").split()]
    return found


def threads(pid: int) -> list[int]:
    """The threads of a process; none: it has ended. Raises as :func:`scan`."""
    with _ProcAccess():
        return [int(task) for task in os.listdir(f"/proc/{pid}/task")]
    return []


def is_traced(pid: int) -> bool | None:
    """Whether another process traces it (proc(5), ``TracerPid``); None: it has ended.

    Raises as :func:`scan`.
    """
    with _ProcAccess():
        status = status_fields(pid)
        return None if status["State"][0] in "ZX" else status["TracerPid"] != "0"
    return None


def start_ticks(pid: int, proc: Path = Path("/proc")) -> int:
    """Start time of a process in ticks since boot (proc(5), ``starttime``); 0: none.

    Raises:
        OSError: the process cannot be read.
    """
    try:
        return int(stat_fields(pid, proc)[19])
    except GONE_ERRORS:
        return 0


def wait_for_any(processes: Sequence[Process], beside: Sequence[int], timeout: float) -> bool:
    """Block until a process has ended or a handle of ``beside`` is readable.

    Returns:
        Whether one of the handles is readable.
    """
    with open_pidfds(list(processes)) as handles:
        if len(handles) < len(processes):
            timeout = 0.0  # one has ended since it was found
        return not set(beside).isdisjoint(readable([*handles, *beside], timeout))


def wait_stopped(pid: int, timeout: float) -> None:
    """Return once a process that was sent SIGSTOP has stopped (or ended).

    Only its parent is notified, which need not be this process; stopping takes microseconds.

    Raises:
        HypervisorError: it still runs after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while (process := read(pid)) and not process.stopped:
        if time.monotonic() > deadline:
            raise HypervisorError(f"process {pid} does not stop")
        os.sched_yield()


def readable(handles: list[int], timeout: float) -> list[int]:
    """Return handles that become readable (pidfds: end) within ``timeout`` seconds."""
    poller = select.poll()
    for handle in handles:
        poller.register(handle, select.POLLIN)
    return [handle for handle, _ in poller.poll(max(0, round(timeout * 1000)))]


@contextmanager
def open_pidfds(processes: list[Process]) -> Iterator[list[int]]:
    """Yield pidfds of the processes that live. Raises as :func:`scan`."""
    with ExitStack() as stack:
        handles = []
        for process in processes:
            with _ProcAccess():
                handle = os.pidfd_open(process.pid)
                stack.callback(os.close, handle)
                if read(process.pid) is not None:
                    handles.append(handle)
        yield handles


def kill_pidfds(handles: list[int], timeout: float, what: str) -> None:
    """Kill processes by their pidfds, and wait until they have ended.

    Raises:
        HypervisorError: one still lives after ``timeout`` seconds.
    """
    if not _kill(handles, time.monotonic() + timeout):
        raise HypervisorError(f"{what} is not gone {timeout:g} s after SIGKILL")


def _kill(handles: list[int], deadline: float) -> bool:
    """Kill processes; return whether all have ended by the deadline."""
    for handle in handles:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    return all(readable([handle], deadline - time.monotonic()) for handle in handles)


def kill_all(find: Callable[[], list[Process]], timeout: float, what: str) -> None:
    """Kill the processes that ``find`` returns, until it returns none.

    Raises:
        HypervisorError: a search that began after ``timeout`` seconds found one, or failed.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() > deadline
        try:
            if not (found := find()):
                return
            with open_pidfds(found) as handles:
                _kill(handles, max(deadline, time.monotonic() + RETRY_SECONDS))
            left = "pid " + ", ".join(str(process.pid) for process in found)
        except HypervisorError as error:
            left = error.message
            time.sleep(RETRY_SECONDS)  # no event tells when, say, files can be opened again
        if late:
            raise HypervisorError(f"{what} is not gone {timeout:g} s after SIGKILL: {left}")
