"""Queries pools for ads and probe jobs of cluster VMs, outside of transactions."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from time import monotonic
from typing import Final, Protocol

from sqlalchemy.orm import Session

from repository.clusters.history import HistoryEntry, record
from repository.clusters.snapshots import Snapshot
from repository.clusters.tables import MAX_SYSTEM, ClusterVmRow, PoolRow
from vmjobs.cluster.pool import IdleJobs, PoolVm, ProbeState, WorkerVmProfile
from vmjobs.cluster.vm_state import Goal, Phase
from vmjobs.errors import Unavailable

logger = logging.getLogger(__name__)

#: How often a pool is queried while no VM waits for its ad or probe job.
POLL_EVERY: Final = timedelta(seconds=15)
#: The duration of longer queries is not counted against the VMs' time limits.
SLOW_AFTER: Final = timedelta(seconds=2)


class Pool(Protocol):
    """An HTCondor pool. Every method raises ``Unavailable("pool", …)``."""

    def vms(self) -> list[PoolVm]:
        """The cluster VMs whose ads are in the collector now, by one query."""

    def probes(self, vms: Sequence[PoolVm]) -> Mapping[tuple[str, int], ProbeState]:
        """The states of the probe jobs of exactly these VMs, by id and incarnation.

        Submits missing probe jobs. The number of calls does not depend on the number of VMs.
        """

    def withdraw(self, vms: Sequence[PoolVm]) -> None:
        """Revoke exactly these VMs, and no others of the same names.

        The collector rejects their tokens and drops their ads, and their probe jobs are removed.
        """

    def idle(self, kinds: Sequence[WorkerVmProfile]) -> Mapping[str, IdleJobs]:
        """The idle jobs for each of these clusters, by name.

        A job that fits several clusters counts for the first one with VMs, else for the first one.
        """

    def offer(self, kinds: Sequence[WorkerVmProfile]) -> None:
        """Advertise one offline ad for each of these clusters, and for no others.

        Repeated calls keep the ads in the collector.
        """


@dataclass
class PoolPoll:
    """The result of querying one pool.

    vms: by name and id of the cluster VM; None: unknown. problem: why a query failed; empty: none
    failed.
    """

    vms: dict[tuple[str, str], PoolVm] | None = None
    problem: str = ""


@dataclass
class PoolPolls:
    """The results of querying pools, by name, and the states of probe jobs.

    begun: start of the first query, in seconds of the monotonic clock.
    """

    begun: float
    pools: dict[str, PoolPoll] = field(default_factory=dict)
    probes: dict[tuple[str, int], ProbeState] = field(default_factory=dict)

    @property
    def delay(self) -> timedelta:
        """Time since the queries began, or 0 if it is short; added to the VMs' time limits."""
        took = timedelta(seconds=monotonic() - self.begun)
        return took if took > SLOW_AFTER else timedelta()


def poll_pools(snapshot: Snapshot, pools: Mapping[str, Pool], present: datetime) -> PoolPolls:
    """Query the pools that are due, and then the probe jobs of their VMs."""
    polls = PoolPolls(monotonic())
    begun = [row for row in snapshot.vms.values() if row.incarnation or row.advertised]
    for name in sorted({row.pool for row in begun}):
        mine = [row for row in begun if row.pool == name]
        if _is_due(snapshot.pools.get(name), mine, present):
            polls.pools[name] = _poll_pool(name, mine, pools, polls.probes)
    return polls


def _is_due(pool: PoolRow | None, rows: Iterable[ClusterVmRow], present: datetime) -> bool:
    if pool is None or present - pool.asked >= POLL_EVERY:
        return True
    # A pool that does not answer costs a time-out each time, for which other pools wait.
    return not pool.problem and any(_is_awaited(row) for row in rows)


def _poll_pool(
    name: str,
    rows: Sequence[ClusterVmRow],
    pools: Mapping[str, Pool],
    probes: dict[tuple[str, int], ProbeState],
) -> PoolPoll:
    pool, poll = pools.get(name), PoolPoll()
    if pool is None:
        poll.problem = f"the pool {name} is not in this service's setting pools any more"
        return poll
    try:
        vms = pool.vms()
        oldest_first = sorted(vms, key=lambda vm: vm.incarnation)
        poll.vms = {(vm.name, vm.id): vm for vm in oldest_first}
        here = [(row, poll.vms.get((row.name, row.id))) for row in rows if _is_awaited(row)]
        if new := [each for row, each in here if each and each.incarnation == row.incarnation]:
            probes.update(pool.probes(new))
    except Unavailable as error:
        poll.problem = error.message
    else:
        _withdraw(name, pool, vms, {row.name: row.id for row in rows})
    return poll


def _withdraw(name: str, pool: Pool, vms: Iterable[PoolVm], present_ids: Mapping[str, str]) -> None:
    """Withdraw the ads of earlier VMs whose names other VMs have now."""
    stale = [each for each in vms if present_ids.get(each.name, each.id) != each.id]
    try:
        if stale:
            pool.withdraw(stale)
    except Unavailable as error:
        logger.warning("ads of earlier VMs stay in the pool %s: %s", name, error.message)


def _is_awaited(row: ClusterVmRow) -> bool:
    """Whether the VM runs and is neither registered nor rejected yet."""
    runs = row.goal == Goal.RUN.value and row.phase == Phase.RUNNING.value
    return runs and row.admitted < row.incarnation and row.condemned < row.incarnation


def has_changes(snapshot: Snapshot, polls: PoolPolls) -> bool:
    """Whether the results change more than the times of the queries."""
    slow = bool(polls.delay)
    for name, poll in polls.pools.items():
        row = snapshot.pools.get(name)
        if row is None or row.problem != poll.problem:
            return True
        for vm in snapshot.vms.values():
            if vm.pool != name:
                continue
            if _polled_values(vm, poll) != _stored_values(vm) or (slow and vm.waiting is not None):
                return True
    return False


def _stored_values(row: ClusterVmRow) -> tuple[int, bool, int, str]:
    return row.advertised, row.busy, row.jobs, row.system


def _polled_values(row: ClusterVmRow, poll: PoolPoll) -> tuple[int, bool, int, str]:
    if poll.vms is None:
        return _stored_values(row)
    vm = poll.vms.get((row.name, row.id))
    if vm is None:
        return 0, False, row.jobs, row.system
    return vm.incarnation, vm.busy, vm.jobs, vm.system[:MAX_SYSTEM]


def record_poll_times(session: Session, polls: PoolPolls, present: datetime) -> None:
    """Store when the pools were queried."""
    for name in polls.pools:
        row = session.get(PoolRow, name)
        if row is not None:
            row.asked = present


def apply_polls(snapshot: Snapshot, polls: PoolPolls, present: datetime) -> list[str]:
    """Apply results to the rows of a snapshot; return pools that begin or cease to answer."""
    turned, delay = [], polls.delay
    for name, poll in polls.pools.items():
        row = snapshot.pools.get(name)
        if row is None:
            row = snapshot.pools[name] = PoolRow(name=name, asked=present, problem="")
        before, row.asked, row.problem = row.problem, present, poll.problem
        if bool(before) != bool(poll.problem):
            turned.append(name)
        for vm in snapshot.vms.values():
            if vm.pool != name:
                continue
            if before and not poll.problem and vm.waiting is not None:
                vm.waiting = present  # time in which the pool did not answer does not count
            _update(vm, poll, present)
            if vm.waiting is not None and delay:
                # A VM that began to wait during the queries gets no more than it has waited.
                vm.waiting = min(vm.waiting, present) + delay
    return turned


def record_polls(session: Session, snapshot: Snapshot, polls: PoolPolls, present: datetime) -> None:
    """Store the results in the rows of a locked snapshot."""
    turned = apply_polls(snapshot, polls, present)
    session.add_all(snapshot.pools.values())
    for name in turned:
        entry = HistoryEntry("POOL", "PROGRESS", f"the pool {name} answers again")
        if problem := polls.pools[name].problem:
            entry = HistoryEntry("POOL", "POOL_UNAVAILABLE", problem)
        logger.warning("%s", entry.message)
        for cluster in sorted({row.cluster for row in snapshot.vms.values() if row.pool == name}):
            record(session, snapshot.clusters[cluster], entry, present)


def _update(row: ClusterVmRow, poll: PoolPoll, present: datetime) -> None:
    here = row.advertised == row.incarnation
    row.advertised, row.busy, row.jobs, row.system = _polled_values(row, poll)
    if here and row.advertised != row.incarnation and row.phase == Phase.RUNNING.value:
        row.waiting = present
