"""Waits until a cluster's VMs are up or have stopped; by default with a timeout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.text import Text

from vmjobs.cli.cluster_support import machines, reason, try_again
from vmjobs.cli.support import echo, is_quiet
from vmjobs.cluster.member import Goal, MemberState
from vmjobs.cluster.wire import Cluster, Member
from vmjobs.errors import Conflict, NotFound
from vmjobs.terminal import printable

if TYPE_CHECKING:
    from vmjobs.client.clusters import Clusters

_F = TypeVar("_F", bound=Callable[..., Any])

#: Default timeout in seconds: fetching an image, booting and joining take far less, even for one VM
#: after the other on a slow node.
PATIENCE = 1800.0
#: Exit status after a timeout, as of timeout(1).
TIMED_OUT = 124
FIRST_POLL = 0.5
LAST_POLL = 2.0


def wait_options(until: str) -> Callable[[_F], _F]:
    """Add ``--wait`` and ``--timeout`` to a command. until: completes "Wait until"."""

    def add(command: _F) -> _F:
        limit = click.option(
            "--timeout",
            type=click.FloatRange(min=0),
            default=PATIENCE,
            show_default=True,
            metavar="SECONDS",
            help="With --wait: wait at most so long, then print the missing VMs with the reasons and "
            "exit with 124. inf: no limit.",
        )
        return click.option("--wait", is_flag=True, help=f"Wait until {until}.")(limit(command))

    return add


def settled(cluster: Cluster) -> bool:
    """Whether enough VMs are UP, all of them of the current generation."""
    up = [m for m in cluster.members if m.state is MemberState.UP and m.goal is Goal.RUN]
    fresh = [m for m in up if m.generation == cluster.generation]
    return len(fresh) == len(up) and len(up) >= cluster.target


def wait_until_up(
    api: Clusters, names: Sequence[str], timeout: float, *, as_declared: bool = True
) -> list[Cluster]:
    """Wait until all clusters are settled, and show progress.

    Exits with 124 after ``timeout``. as_declared: a rollback to an earlier generation is an error.

    Raises:
        Conflict: a cluster is draining, being deleted or rolled back: its VMs will not be up.
    """

    def look() -> list[Cluster]:
        return [_going_up(api.get(name), as_declared) for name in names]

    found = _watched(look, lambda found: all(map(settled, found)), _progress, timeout)
    late = [cluster for cluster in found if not settled(cluster)]
    for cluster in late:
        _say_late(
            f"not all VMs are up after {timeout:g} s: {_progress(cluster)}", _missing(cluster), cluster
        )
    if late:
        sys.exit(TIMED_OUT)
    return found


def wait_until_empty(api: Clusters, before: Cluster, timeout: float) -> Cluster | None:
    """Wait until all VMs of a draining or deleted cluster have stopped.

    Return the drained cluster, or None if it was deleted. Exits with 124 after ``timeout``.

    Raises:
        Conflict: the cluster was resumed meanwhile.
    """

    def look() -> list[Cluster]:
        try:
            found = api.get(before.name)
        except NotFound:
            return []
        return [_ending(found)] if found.created == before.created else []  # else a new cluster

    def over(found: list[Cluster]) -> bool:
        return not any(cluster.deleting or there(cluster) for cluster in found)

    found = _watched(look, over, _ending_progress, timeout)
    if not over(found):
        (cluster,) = found
        left = (f"{_line(m)}{' (a job runs in it)' if m.busy else ''}" for m in there(cluster))
        _say_late(f"VMs still run after {timeout:g} s: {_ending_progress(cluster)}", left, cluster)
        sys.exit(TIMED_OUT)
    return found[0] if found else None


def there(cluster: Cluster) -> list[Member]:
    """Return the cluster VMs that are not GONE."""
    return [member for member in cluster.members if member.state is not MemberState.GONE]


def _watched(
    look: Callable[[], list[Cluster]],
    over: Callable[[list[Cluster]], bool],
    progress: Callable[[Cluster], str],
    timeout: float,
) -> list[Cluster]:
    """Poll until ``over`` is true or ``timeout`` has passed; return the last result."""
    end = time.monotonic() + timeout
    terminal = Console(stderr=True)
    watch = _Watch(quiet=terminal.is_terminal or is_quiet())
    pause = FIRST_POLL
    with terminal.status("waiting") as status:
        while True:
            found = look()
            if watch.news(found):
                pause = FIRST_POLL
            status.update(Text(printable("; ".join(map(progress, found)))))
            left = end - time.monotonic()
            if over(found) or left <= 0:
                return found
            time.sleep(min(pause, left))
            pause = min(LAST_POLL, pause * 1.5)


class _Watch:
    """Prints each state change of a cluster VM as a line, unless ``quiet``."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._seen: dict[str, tuple[MemberState, str]] = {}

    def news(self, found: Sequence[Cluster]) -> bool:
        """Print changed states; return whether there are any."""
        fresh = False
        for member in (member for cluster in found for member in cluster.members):
            seen = (member.state, reason(member))
            if self._seen.get(member.id) != seen:
                self._seen[member.id] = seen
                fresh = True
                if not self._quiet:
                    echo(_line(member), err=True)
        return fresh


def _going_up(cluster: Cluster, as_declared: bool) -> Cluster:
    if cluster.deleting:
        raise Conflict(f"{cluster.name} is being deleted: its VMs will not be up")
    if cluster.draining:
        hint = f"`vmjobs cluster resume {cluster.name}` starts VMs again"
        raise Conflict(f"{cluster.name} is drained: its VMs will not be up", hint=hint)
    if cluster.failed and as_declared:
        raise Conflict(f"{cluster.name}: {cluster.failed.message}", hint=try_again(cluster))
    return cluster


def _ending(cluster: Cluster) -> Cluster:
    if not (cluster.deleting or cluster.draining):
        raise Conflict(f"{cluster.name} was resumed: its VMs do not stop")
    return cluster


def _progress(cluster: Cluster) -> str:
    states = [member.state for member in cluster.members if member.state is not MemberState.UP]
    others = ", ".join(f"{states.count(s)} {s}" for s in MemberState if s in states)
    return f"{cluster.name}: {cluster.up} of {cluster.target} UP" + (f" ({others})" if others else "")


def _line(member: Member) -> str:
    where = f" on {member.node}" if member.node else ""
    why = reason(member)
    return printable(f"{member.name} {member.state}{where}" + (f": {why}" if why else ""))


def _ending_progress(cluster: Cluster) -> str:
    busy = sum(member.busy for member in there(cluster))
    return f"{cluster.name}: {machines(len(there(cluster)))} left, {busy} of them with jobs"


def _missing(cluster: Cluster) -> Iterator[str]:
    """Yield a line for each VM that is not UP or is of an old generation."""
    for member in cluster.members:
        if member.state is not MemberState.UP:
            yield _line(member)
        elif member.generation != cluster.generation:
            yield f"{_line(member)} (of an earlier declaration)"


def _say_late(what: str, lines: Iterable[str], cluster: Cluster) -> None:
    echo(f"vmjobs: {what}", err=True)
    for line in lines:
        echo(f"  {line}", err=True)
    echo(f"the service continues: see `vmjobs cluster show {cluster.name}`", err=True)
