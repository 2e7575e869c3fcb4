"""Finds the HTCondor starter of a process: only jobs of a slot may ask the agent for a VM."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from vmjobs.errors import Forbidden, Unavailable
from vmjobs.hypervisor.procs import GONE_ERRORS, start_ticks

#: A starter's process name (proc(5), ``comm``).
STARTER_COMM = "condor_starter"
#: The search for a starter stops after so many ancestors.
MAX_ANCESTORS = 64


class StarterProcess(NamedTuple):
    """Identifies a starter uniquely. birth: see :func:`vmjobs.hypervisor.procs.start_ticks`."""

    pid: int
    birth: int


@contextmanager
def _procfs_errors() -> Iterator[None]:
    """Turn errors of procfs other than a missing process into the transient ``Unavailable``."""
    try:
        yield
    except GONE_ERRORS:
        raise
    except OSError as error:
        raise Unavailable("agent", f"this node cannot inspect processes: {error.strerror}") from error


def read_starter(pid: int, proc: Path = Path("/proc")) -> StarterProcess:
    """Return a process as a starter; its birth is 0 if it does not exist.

    Raises:
        Unavailable: /proc cannot be read.
    """
    with _procfs_errors():
        return StarterProcess(pid, start_ticks(pid, proc))


def effective_uid(pid: int, proc: Path = Path("/proc")) -> int:
    """Return a process's effective user id, as for unix(7) sockets; -1: there is no process.

    Raises:
        Unavailable: /proc cannot be read.
    """
    try:
        with _procfs_errors():
            return _uids((proc / str(pid) / "status").read_text("utf-8", "replace"))[1]
    except GONE_ERRORS:
        return -1


def find_starter(pid: int, trusted: Collection[int], proc: Path = Path("/proc")) -> int:
    """Return the process id of the starter that ``pid`` descends from.

    trusted: real user ids that a starter may have. Users can name their processes freely, even those
        of set-user-id programs, but the real user id stays theirs. A starter's effective id changes.

    Raises:
        Forbidden: the process has no starter.
        Unavailable: /proc cannot be read.
    """
    at = pid
    for _ in range(MAX_ANCESTORS):
        directory = proc / str(at)
        try:
            with _procfs_errors():
                stat = (directory / "stat").read_text("utf-8", "replace")
                status = (directory / "status").read_text("utf-8", "replace")
        except GONE_ERRORS:
            break
        # pid (comm) state ppid ...; the name may contain any character.
        comm = stat[stat.index("(") + 1 : stat.rindex(")")]
        if comm == STARTER_COMM and _uids(status)[0] in trusted:
            return at
        at = int(stat[stat.rindex(")") + 2 :].split()[1])
    raise Forbidden("only an HTCondor job on this node may ask for a VM to run in")


def _uids(status: str) -> tuple[int, int]:
    """Return real and effective user id from ``Uid:``; the name above has no line break."""
    for line in status.splitlines():
        if line.startswith("Uid:"):
            real, effective = line.split()[1:3]
            return int(real), int(effective)
    return -1, -1
