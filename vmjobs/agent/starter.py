"""Which of HTCondor's starters a process belongs to: who asks for a machine must be a slot's job."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from vmjobs.errors import Forbidden
from vmjobs.hypervisor.procs import GONE

#: A starter, as the kernel names it (proc(5), ``comm``).
COMM = "condor_starter"
#: Longer lines of ancestors are nobody's.
MAX_ANCESTORS = 64


class Starter(NamedTuple):
    """A starter, as no other process is or was. birth: see :func:`vmjobs.hypervisor.procs.birth_of`."""

    pid: int
    birth: int


def owner_of(pid: int, proc: Path = Path("/proc")) -> int:
    """The effective user id of a process, which unix(7) has for its connections; -1: there is none.

    Raises:
        OSError: nobody can look.
    """
    try:
        return _uids((proc / str(pid) / "status").read_text("utf-8", "replace"))[1]
    except GONE:
        return -1


def starter_of(pid: int, trusted: Collection[int], proc: Path = Path("/proc")) -> int:
    """The process id of the starter that ``pid`` descends from.

    trusted: real user ids that a starter may have. Anybody can name a process of theirs as they like,
        one that runs a set-user-id program too; its real user id stays theirs. A starter's effective
        one changes.

    Raises:
        Forbidden: there is none.
        OSError: nobody can look.
    """
    at = pid
    for _ in range(MAX_ANCESTORS):
        directory = proc / str(at)
        try:
            stat = (directory / "stat").read_text("utf-8", "replace")
            status = (directory / "status").read_text("utf-8", "replace")
        except GONE:
            break
        # pid (comm) state ppid ...; the name may hold anything.
        comm = stat[stat.index("(") + 1 : stat.rindex(")")]
        if comm == COMM and _uids(status)[0] in trusted:
            return at
        at = int(stat[stat.rindex(")") + 2 :].split()[1])
    raise Forbidden("only a job of HTCondor's on this node may ask for a machine to run in")


def _uids(status: str) -> tuple[int, int]:
    """Real and effective user id, by the line ``Uid:``; the name above has no line break."""
    for line in status.splitlines():
        if line.startswith("Uid:"):
            real, effective = line.split()[1:3]
            return int(real), int(effective)
    return -1, -1
