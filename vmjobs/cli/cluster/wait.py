"""Waits until a cluster's VMs are up or have stopped; by default with a timeout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.text import Text

from vmjobs.cli.cluster.common import format_reason, format_vm_count, retry_hint
from vmjobs.cli.common import EXIT_TIMED_OUT, echo, is_quiet
from vmjobs.cluster.vm_state import ClusterVmState, Goal
from vmjobs.cluster.wire import Cluster, ClusterVm
from vmjobs.errors import Conflict, NotFound
from vmjobs.terminal import printable

if TYPE_CHECKING:
    from vmjobs.client.clusters import Clusters

_F = TypeVar("_F", bound=Callable[..., Any])

#: Default timeout in seconds: fetching an image, booting and joining take far less, even for one VM
#: after the other on a slow node.
DEFAULT_TIMEOUT_SECONDS = 1800.0
FIRST_POLL_SECONDS = 0.5
LAST_POLL_SECONDS = 2.0


def wait_options(until: str) -> Callable[[_F], _F]:
    """Add ``--wait`` and ``--timeout`` to a command. until: completes "Wait until"."""

    def add(command: _F) -> _F:
        limit = click.option(
            "--timeout",
            type=click.FloatRange(min=0),
            default=DEFAULT_TIMEOUT_SECONDS,
            show_default=True,
            metavar="SECONDS",
            help="With --wait: wait at most so long, then print the missing VMs with the reasons and "
            "exit with 124. inf: no limit.",
        )
        return click.option("--wait", is_flag=True, help=f"Wait until {until}.")(limit(command))

    return add


def has_settled(cluster: Cluster) -> bool:
    """Whether enough VMs are UP, all of them of the current generation."""
    up = [m for m in cluster.members if m.state is ClusterVmState.UP and m.goal is Goal.RUN]
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

    def fetch() -> list[Cluster]:
        return [_require_starting(api.get(name), as_declared) for name in names]

    found = _poll_until(fetch, lambda found: all(map(has_settled, found)), _progress, timeout)
    late = [cluster for cluster in found if not has_settled(cluster)]
    for cluster in late:
        _print_timeout(
            f"not all VMs are up after {timeout:g} s: {_progress(cluster)}",
            _unfinished_lines(cluster),
            cluster,
        )
    if late:
        sys.exit(EXIT_TIMED_OUT)
    return found


def wait_until_empty(api: Clusters, before: Cluster, timeout: float) -> Cluster | None:
    """Wait until all VMs of a draining or deleted cluster have stopped.

    Return the drained cluster, or None if it was deleted. Exits with 124 after ``timeout``.

    Raises:
        Conflict: the cluster was resumed meanwhile.
    """

    def fetch() -> list[Cluster]:
        try:
            found = api.get(before.name)
        except NotFound:
            return []
        return [_require_ending(found)] if found.created == before.created else []  # else a new cluster

    def is_done(found: list[Cluster]) -> bool:
        return not any(cluster.deleting or remaining_vms(cluster) for cluster in found)

    found = _poll_until(fetch, is_done, _ending_progress, timeout)
    if not is_done(found):
        (cluster,) = found
        left = (
            f"{_vm_line(m)}{' (a job runs in it)' if m.busy else ''}" for m in remaining_vms(cluster)
        )
        _print_timeout(f"VMs still run after {timeout:g} s: {_ending_progress(cluster)}", left, cluster)
        sys.exit(EXIT_TIMED_OUT)
    return found[0] if found else None


def remaining_vms(cluster: Cluster) -> list[ClusterVm]:
    """Return the cluster VMs that are not GONE."""
    return [vm for vm in cluster.members if vm.state is not ClusterVmState.GONE]


def _poll_until(
    fetch: Callable[[], list[Cluster]],
    is_done: Callable[[list[Cluster]], bool],
    progress: Callable[[Cluster], str],
    timeout: float,
) -> list[Cluster]:
    """Poll until ``is_done`` is true or ``timeout`` has passed; return the last result."""
    end = time.monotonic() + timeout
    terminal = Console(stderr=True)
    quiet = terminal.is_terminal or is_quiet()
    seen: dict[str, tuple[ClusterVmState, str]] = {}
    pause = FIRST_POLL_SECONDS
    with terminal.status("waiting") as status:
        while True:
            found = fetch()
            for vm in _changed_vms(found, seen):
                pause = FIRST_POLL_SECONDS
                if not quiet:
                    echo(_vm_line(vm), err=True)
            status.update(Text(printable("; ".join(map(progress, found)))))
            left = end - time.monotonic()
            if is_done(found) or left <= 0:
                return found
            time.sleep(min(pause, left))
            pause = min(LAST_POLL_SECONDS, pause * 1.5)


def _changed_vms(
    clusters: Sequence[Cluster], seen: dict[str, tuple[ClusterVmState, str]]
) -> Iterator[ClusterVm]:
    """Yield VMs whose state or its reason is not as ``seen``, and note it there."""
    for vm in (vm for cluster in clusters for vm in cluster.members):
        state = vm.state, format_reason(vm)
        if seen.get(vm.id) != state:
            seen[vm.id] = state
            yield vm


def _require_starting(cluster: Cluster, as_declared: bool) -> Cluster:
    if cluster.deleting:
        raise Conflict(f"{cluster.name} is being deleted: its VMs will not be up")
    if cluster.draining:
        hint = f"`vmjobs cluster resume {cluster.name}` starts VMs again"
        raise Conflict(f"{cluster.name} is drained: its VMs will not be up", hint=hint)
    if cluster.failed and as_declared:
        raise Conflict(f"{cluster.name}: {cluster.failed.message}", hint=retry_hint(cluster))
    return cluster


def _require_ending(cluster: Cluster) -> Cluster:
    if not (cluster.deleting or cluster.draining):
        raise Conflict(f"{cluster.name} was resumed: its VMs do not stop")
    return cluster


def _progress(cluster: Cluster) -> str:
    states = [vm.state for vm in cluster.members if vm.state is not ClusterVmState.UP]
    others = ", ".join(f"{states.count(s)} {s}" for s in ClusterVmState if s in states)
    return f"{cluster.name}: {cluster.up} of {cluster.target} UP" + (f" ({others})" if others else "")


def _vm_line(vm: ClusterVm) -> str:
    where = f" on {vm.node}" if vm.node else ""
    why = format_reason(vm)
    return printable(f"{vm.name} {vm.state}{where}" + (f": {why}" if why else ""))


def _ending_progress(cluster: Cluster) -> str:
    busy = sum(vm.busy for vm in remaining_vms(cluster))
    return (
        f"{cluster.name}: {format_vm_count(len(remaining_vms(cluster)))} left, {busy} of them with jobs"
    )


def _unfinished_lines(cluster: Cluster) -> Iterator[str]:
    """Yield a line for each VM that is not UP or is of an old generation."""
    for vm in cluster.members:
        if vm.state is not ClusterVmState.UP:
            yield _vm_line(vm)
        elif vm.generation != cluster.generation:
            yield f"{_vm_line(vm)} (of an earlier declaration)"


def _print_timeout(what: str, lines: Iterable[str], cluster: Cluster) -> None:
    echo(f"vmjobs: {what}", err=True)
    for line in lines:
        echo(f"  {line}", err=True)
    echo(f"the service continues: see `vmjobs cluster show {cluster.name}`", err=True)
