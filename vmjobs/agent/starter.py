"""Which of HTCondor's starters a process belongs to: who asks for a machine must be a slot's job."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from vmjobs.errors import Forbidden

#: A starter, as the kernel names it (proc(5), ``comm``).
COMM = "condor_starter"
#: Longer lines of ancestors are nobody's.
MAX_ANCESTORS = 64


class Starter(NamedTuple):
    """A starter, as no other process is or was. birth: see :func:`birth_of`."""

    pid: int
    birth: int


def birth_of(pid: int, proc: Path = Path("/proc")) -> int:
    """When a process began, in ticks since the node did (proc(5), ``starttime``); 0: there is none."""
    try:
        stat = (proc / str(pid) / "stat").read_text("utf-8", "replace")
    except OSError:
        return 0
    return int(stat[stat.rindex(")") + 2 :].split()[19])


def starter_of(pid: int, trusted: Collection[int], proc: Path = Path("/proc")) -> int:
    """The process id of the starter that ``pid`` descends from.

    trusted: real user ids that a starter may have. Anybody can name a process of theirs as they like,
        one that runs a set-user-id program too; its real user id stays theirs. A starter's effective
        one changes.

    Raises:
        Forbidden: there is none.
    """
    at = pid
    for _ in range(MAX_ANCESTORS):
        directory = proc / str(at)
        try:
            stat = (directory / "stat").read_text("utf-8", "replace")
            status = (directory / "status").read_text("utf-8", "replace")
        except OSError:
            break
        # pid (comm) state ppid ...; the name may hold anything.
        comm = stat[stat.index("(") + 1 : stat.rindex(")")]
        if comm == COMM and _real_uid(status) in trusted:
            return at
        at = int(stat[stat.rindex(")") + 2 :].split()[1])
    raise Forbidden("only a job of HTCondor's on this node may ask for a machine to run in")


def _real_uid(status: str) -> int:
    """The first number of the line ``Uid:``; the name in the first line cannot hold a line break."""
    for line in status.splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return -1
