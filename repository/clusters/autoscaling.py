"""Autoscaling: counts idle jobs of pools, and resizes clusters with a range of sizes.

Pools are queried outside of transactions; the new sizes are written within one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from time import monotonic
from typing import Final

from sqlalchemy.orm import Session

from repository.clusters.core import pool_address
from repository.clusters.history import HistoryEntry, record
from repository.clusters.pools import Pool
from repository.clusters.snapshots import Snapshot
from repository.clusters.tables import ClusterRow, ClusterVmRow, DemandRow, PoolDemandRow
from vmjobs.cluster.autoscaler import Demand, ScaleDownDelay, can_wake, decide_size, still_woken
from vmjobs.cluster.pool import IdleJobs, WorkerVmProfile
from vmjobs.cluster.spec import ClusterSpec, SizeRange
from vmjobs.cluster.vm_state import ClusterVmState, Goal
from vmjobs.config import Config
from vmjobs.errors import NotFound, Unavailable

logger = logging.getLogger(__name__)

#: How often a pool is queried for idle jobs, which wait for it.
QUERY_EVERY: Final = timedelta(seconds=3)
#: A busy pool answers slowly: queries take at most one part in this many of the time.
QUERY_TIME_PART: Final = 10
#: The same after a failed query, since each may cost a time-out for which other clusters wait.
QUERY_AFTER_FAILURE: Final = timedelta(seconds=60)


@dataclass
class PoolDemand:
    """The result of querying one pool for idle jobs.

    idle: by cluster. problem: why the query failed; empty: it did not. offers: whether the pool may
    have ads of VMs that could be started. took: duration of the query.
    """

    idle: dict[str, IdleJobs] = field(default_factory=dict)
    problem: str = ""
    offers: bool = False
    took: timedelta = timedelta()

    @property
    def pause(self) -> timedelta:
        """Time until the next query."""
        return QUERY_AFTER_FAILURE if self.problem else max(QUERY_EVERY, QUERY_TIME_PART * self.took)


def query_demand(
    config: Config, snapshot: Snapshot, pools: Mapping[str, Pool], present: datetime
) -> dict[str, PoolDemand]:
    """Query the pools that are due, and advertise to them which VMs could be started."""
    autoscaled: dict[str, list[ClusterRow]] = {
        name: [] for name, row in snapshot.pool_demands.items() if row.offers
    }
    for row, name in _autoscaled(config, snapshot):
        autoscaled.setdefault(name, []).append(row)
    found = {}
    for name, rows in sorted(autoscaled.items()):
        before = snapshot.pool_demands.get(name)
        if before is None or present >= before.again:
            began = monotonic()
            found[name] = _query_pool(name, rows, snapshot, pools)
            found[name].took = timedelta(seconds=monotonic() - began)
    return found


def _autoscaled(config: Config, snapshot: Snapshot) -> Iterator[tuple[ClusterRow, str]]:
    """Yield active clusters with a range of sizes, and their pools."""
    for row in snapshot.clusters.values():
        if not (row.draining or row.deleting) and isinstance(_spec(row).size, SizeRange):
            try:
                yield row, pool_address(config, _spec(row).pool).name
            except NotFound:
                continue  # recorded when a VM of it is created


def _query_pool(
    name: str, rows: list[ClusterRow], snapshot: Snapshot, pools: Mapping[str, Pool]
) -> PoolDemand:
    pool, found = pools.get(name), PoolDemand()
    if pool is None:
        found.problem = f"the pool {name} is not in this service's setting pools any more"
        return found
    kinds = {row.name: _vm_profile(row, snapshot) for row in rows}
    try:
        found.idle = dict(pool.idle(list(kinds.values()))) if kinds else {}
    except Unavailable as error:
        found.problem = error.message
        found.offers = True
        return found
    more = [row.name for row in rows if row.target < _spec(row).range.max]
    try:
        pool.offer([kinds[cluster] for cluster in more])
        found.offers = bool(more)
    except Unavailable as error:
        logger.warning("cannot advertise VMs that could be started: %s", error.message)
        found.offers = True
    return found


def _vm_profile(row: ClusterRow, snapshot: Snapshot) -> WorkerVmProfile:
    spec, demand, up = _spec(row), snapshot.demands.get(row.name), ClusterVmState.UP.value
    known = demand.known if demand is not None and demand.kind == _settings_digest(row) else {}
    sources = [
        vm.name
        for vm in snapshot.vms.values()
        if vm.cluster == row.name and vm.generation == row.generation and vm.state == up
    ]
    return WorkerVmProfile(
        cluster=row.name,
        cpus=spec.cpus,
        memory=spec.memory,
        disk=spec.disk,
        attributes=spec.attributes,
        start=spec.start,
        known=known,
        learn="" if known else min(sources, default=""),
        up=sum(m.cluster == row.name and m.state == up for m in snapshot.vms.values()),
    )


def _settings_digest(row: ClusterRow) -> str:
    """Return a digest of image and VM settings, equal for VMs that are alike."""
    spec = _spec(row).model_dump(
        mode="json", include={"cpus", "memory", "disk", "attributes", "hypervisor"}
    )
    return hashlib.sha256(json.dumps([row.image, spec], sort_keys=True).encode()).hexdigest()


def _spec(row: ClusterRow) -> ClusterSpec:
    return ClusterSpec.model_validate(row.spec)


def store_demand(
    config: Config,
    session: Session,
    snapshot: Snapshot,
    pool_demands: Mapping[str, PoolDemand],
    present: datetime,
) -> None:
    """Store results and the new sizes of clusters in the rows of a locked snapshot."""
    changed_pools = {
        name
        for name, found in pool_demands.items()
        if _store_pool(session, snapshot, name, found, present)
    }
    active = {row.name: (row, name) for row, name in _autoscaled(config, snapshot)}
    for cluster, kept in snapshot.demands.items():
        if cluster not in active:
            kept.since = None  # time in which the cluster is inactive does not count
    for row, name in active.values():
        found = pool_demands.get(name)
        if found is None:
            continue
        if name in changed_pools:
            entry = HistoryEntry(
                "DEMAND", "PROGRESS", f"idle jobs of the pool {name} are counted again"
            )
            if found.problem:
                entry = HistoryEntry(
                    "DEMAND", "POOL_UNAVAILABLE", f"idle jobs are not counted: {found.problem}"
                )
            record(session, row, entry, present)
        _resize(session, snapshot, row, found.idle.get(row.name), present)


def _store_pool(
    session: Session, snapshot: Snapshot, name: str, found: PoolDemand, present: datetime
) -> bool:
    """Store the result of a pool; return whether it began or ceased to answer."""
    row = snapshot.pool_demands.get(name)
    if row is None:
        row = snapshot.pool_demands[name] = PoolDemandRow(pool=name, problem="")
        session.add(row)
    changed_pools = bool(row.problem) != bool(found.problem)
    row.problem, row.offers = found.problem, found.offers
    row.again = present + found.pause
    return changed_pools


def _resize(
    session: Session, snapshot: Snapshot, row: ClusterRow, idle: IdleJobs | None, present: datetime
) -> None:
    kept = snapshot.demands.get(row.name)
    if kept is None:
        kept = snapshot.demands[row.name] = _new_demand(session, row)
    if idle is not None and idle.known:
        kept.kind, kept.known = _settings_digest(row), dict(idle.known)
    demand = None
    if idle is not None:
        busy = sum(_is_busy(vm, snapshot) for vm in snapshot.vms.values() if vm.cluster == row.name)
        demand = Demand(idle.jobs, idle.vms, busy)
    scale_down_delay = ScaleDownDelay(kept.since, kept.most) if kept.since is not None else None
    kept.woken = still_woken(kept.woken, demand, present)
    sizing = decide_size(
        _spec(row), row.target, scale_down_delay, demand, present, is_awake=kept.woken is not None
    )
    delay = sizing.scale_down_delay
    kept.since, kept.most = (delay.since, delay.most) if delay else (None, 0)
    if sizing.target != row.target:
        row.target, row.updated = sizing.target, present
        record(session, row, HistoryEntry("SCALED", message=sizing.why), present)


def wake(session: Session, row: ClusterRow, who: str, present: datetime) -> bool:
    """Set a locked cluster from size 0 to 1. Return whether it was at 0 and may have VMs."""
    if row.draining or row.deleting or not can_wake(_spec(row), row.target):
        return False
    kept = session.get(DemandRow, row.name) or _new_demand(session, row)
    kept.woken, kept.since, kept.most = present, None, 0
    row.target, row.updated = 1, present
    entry = HistoryEntry("SCALED", message=f"1 VM: woken by a request of {who}")
    record(session, row, entry, present)
    return True


def _new_demand(session: Session, row: ClusterRow) -> DemandRow:
    made = DemandRow(cluster=row.name, kind="", known={}, most=0)
    session.add(made)
    return made


def _is_busy(vm: ClusterVmRow, snapshot: Snapshot) -> bool:
    """Whether the VM runs a job other than our probe job."""
    wanted = vm.goal == Goal.RUN.value and snapshot.heard(vm)
    return wanted and vm.busy and vm.jobs > 0
