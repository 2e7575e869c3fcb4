"""Which of HTCondor's starters a process belongs to: who asks for a machine must be a slot's job."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from vmjobs.errors import Forbidden, Unavailable
from vmjobs.hypervisor.procs import GONE, birth_of

#: A starter, as the kernel names it (proc(5), ``comm``).
COMM = "condor_starter"
#: Longer lines of ancestors are nobody's.
MAX_ANCESTORS = 64


class Starter(NamedTuple):
    """A starter, as no other process is or was. birth: see :func:`vmjobs.hypervisor.procs.birth_of`."""

    pid: int
    birth: int


@contextmanager
def _looking() -> Iterator[None]:
    """That nobody can look, for want of a file, say, is no fault of whom is looked at, and passes."""
    try:
        yield
    except GONE:
        raise
    except OSError as error:
        raise Unavailable("agent", f"this node cannot look at processes: {error.strerror}") from error


def as_it_is(pid: int, proc: Path = Path("/proc")) -> Starter:
    """A process as a starter; with a birth of 0 there is none.

    Raises:
        Unavailable: nobody can look.
    """
    with _looking():
        return Starter(pid, birth_of(pid, proc))


def owner_of(pid: int, proc: Path = Path("/proc")) -> int:
    """The effective user id of a process, which unix(7) has for its connections; -1: there is none.

    Raises:
        Unavailable: nobody can look.
    """
    try:
        with _looking():
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
        Unavailable: nobody can look.
    """
    at = pid
    for _ in range(MAX_ANCESTORS):
        directory = proc / str(at)
        try:
            with _looking():
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
