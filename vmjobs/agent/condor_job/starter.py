"""Finds the HTCondor starter of a process: only jobs of a slot may ask the agent for a VM."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from vmjobs.errors import Forbidden, Unavailable
from vmjobs.hypervisor.procs import GONE_ERRORS, start_ticks, status_fields

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
            return int(status_fields(pid, proc)["Uid"].split()[1])
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
        try:
            with _procfs_errors():
                status = status_fields(at, proc)
        except GONE_ERRORS:
            break
        if status["Name"] == STARTER_COMM and int(status["Uid"].split()[0]) in trusted:
            return at
        at = int(status["PPid"])
    raise Forbidden("only an HTCondor job on this node may ask for a VM to run in")
