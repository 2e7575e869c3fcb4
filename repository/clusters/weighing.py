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

from repository.clusters.core import ClusterCore
from repository.clusters.history import Told, record
from repository.clusters.loading import World
from repository.clusters.tables import ClusterRow, DemandRow, MemberRow, WeighedRow
from vmjobs.cluster.demand import Demand, Slack, held, size, wakes
from vmjobs.cluster.member import Goal, MemberState
from vmjobs.cluster.spec import ClusterSpec, Size
from vmjobs.errors import NotFound, Unavailable
from vmjobs.ports import IdleJobs, MachineKind, Pool

logger = logging.getLogger(__name__)

#: How often a pool is queried for idle jobs, which wait for it.
WEIGH_EVERY: Final = timedelta(seconds=3)
#: A busy pool answers slowly: queries take at most one part in this many of the time.
WEIGH_SHARE: Final = 10
#: The same after a failed query, since each may cost a time-out for which other clusters wait.
WEIGH_AGAIN: Final = timedelta(seconds=60)


@dataclass
class Weighed:
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
        return WEIGH_AGAIN if self.problem else max(WEIGH_EVERY, WEIGH_SHARE * self.took)


def ask(
    core: ClusterCore, world: World, pools: Mapping[str, Pool], present: datetime
) -> dict[str, Weighed]:
    """Query the pools that are due, and advertise to them which VMs could be started."""
    ranged: dict[str, list[ClusterRow]] = {
        name: [] for name, row in world.weighed.items() if row.offers
    }
    for row, name in _ranged(core, world):
        ranged.setdefault(name, []).append(row)
    found = {}
    for name, rows in sorted(ranged.items()):
        before = world.weighed.get(name)
        if before is None or present >= before.again:
            began = monotonic()
            found[name] = _weigh(name, rows, world, pools)
            found[name].took = timedelta(seconds=monotonic() - began)
    return found


def _ranged(core: ClusterCore, world: World) -> Iterator[tuple[ClusterRow, str]]:
    """Yield active clusters with a range of sizes, and their pools."""
    for row in world.clusters.values():
        if not (row.draining or row.deleting) and isinstance(_spec(row).size, Size):
            try:
                yield row, core.address(_spec(row).pool).name
            except NotFound:
                continue  # recorded when a VM of it is created


def _weigh(name: str, rows: list[ClusterRow], world: World, pools: Mapping[str, Pool]) -> Weighed:
    pool, found = pools.get(name), Weighed()
    if pool is None:
        found.problem = f"the pool {name} is not in this service's setting pools any more"
        return found
    kinds = {row.name: _kind(row, world) for row in rows}
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


def _kind(row: ClusterRow, world: World) -> MachineKind:
    spec, demand, up = _spec(row), world.demands.get(row.name), MemberState.UP.value
    known = demand.known if demand is not None and demand.kind == _made_of(row) else {}
    teachers = [
        member.name
        for member in world.members.values()
        if member.cluster == row.name and member.generation == row.generation and member.state == up
    ]
    return MachineKind(
        cluster=row.name,
        cpus=spec.cpus,
        memory=spec.memory,
        disk=spec.disk,
        attributes=spec.attributes,
        start=spec.start,
        known=known,
        learn="" if known else min(teachers, default=""),
        up=sum(m.cluster == row.name and m.state == up for m in world.members.values()),
    )


def _made_of(row: ClusterRow) -> str:
    """Return a digest of image and VM settings, equal for VMs that are alike."""
    spec = _spec(row).model_dump(
        mode="json", include={"cpus", "memory", "disk", "attributes", "hypervisor"}
    )
    return hashlib.sha256(json.dumps([row.image, spec], sort_keys=True).encode()).hexdigest()


def _spec(row: ClusterRow) -> ClusterSpec:
    return ClusterSpec.model_validate(row.spec)


def note(
    core: ClusterCore,
    session: Session,
    world: World,
    weighed: Mapping[str, Weighed],
    present: datetime,
) -> None:
    """Store results and the new sizes of clusters in the rows of a locked snapshot."""
    turned = {
        name for name, found in weighed.items() if _note_pool(session, world, name, found, present)
    }
    active = {row.name: (row, name) for row, name in _ranged(core, world)}
    for cluster, kept in world.demands.items():
        if cluster not in active:
            kept.since = None  # time in which the cluster is inactive does not count
    for row, name in active.values():
        found = weighed.get(name)
        if found is None:
            continue
        if name in turned:
            told = Told("DEMAND", "PROGRESS", f"idle jobs of the pool {name} are counted again")
            if found.problem:
                told = Told("DEMAND", "POOL_UNAVAILABLE", f"idle jobs are not counted: {found.problem}")
            record(session, row, told, present)
        _resize(session, world, row, found.idle.get(row.name), present)


def _note_pool(session: Session, world: World, name: str, found: Weighed, present: datetime) -> bool:
    """Store the result of a pool; return whether it began or ceased to answer."""
    row = world.weighed.get(name)
    if row is None:
        row = world.weighed[name] = WeighedRow(pool=name, problem="")
        session.add(row)
    turned = bool(row.problem) != bool(found.problem)
    row.problem, row.offers = found.problem, found.offers
    row.again = present + found.pause
    return turned


def _resize(
    session: Session, world: World, row: ClusterRow, idle: IdleJobs | None, present: datetime
) -> None:
    kept = world.demands.get(row.name)
    if kept is None:
        kept = world.demands[row.name] = _nothing_known(session, row)
    if idle is not None and idle.known:
        kept.kind, kept.known = _made_of(row), dict(idle.known)
    demand = None
    if idle is not None:
        busy = sum(
            _busy(member, world) for member in world.members.values() if member.cluster == row.name
        )
        demand = Demand(idle.jobs, idle.machines, busy)
    slack = Slack(kept.since, kept.most) if kept.since is not None else None
    kept.woken = held(kept.woken, demand, present)
    sizing = size(_spec(row), row.target, slack, demand, present, awake=kept.woken is not None)
    kept.since, kept.most = (sizing.slack.since, sizing.slack.most) if sizing.slack else (None, 0)
    if sizing.target != row.target:
        row.target, row.updated = sizing.target, present
        record(session, row, Told("SCALED", message=sizing.why), present)


def wake(session: Session, row: ClusterRow, who: str, present: datetime) -> bool:
    """Set a locked cluster from size 0 to 1. Return whether it was at 0 and may have VMs."""
    if row.draining or row.deleting or not wakes(_spec(row), row.target):
        return False
    kept = session.get(DemandRow, row.name) or _nothing_known(session, row)
    kept.woken, kept.since, kept.most = present, None, 0
    row.target, row.updated = 1, present
    told = Told("SCALED", message=f"1 VM: woken by a request of {who}")
    record(session, row, told, present)
    return True


def _nothing_known(session: Session, row: ClusterRow) -> DemandRow:
    made = DemandRow(cluster=row.name, kind="", known={}, most=0)
    session.add(made)
    return made


def _busy(member: MemberRow, world: World) -> bool:
    """Whether the VM runs a job other than our probe job."""
    wanted = member.goal == Goal.RUN.value and world.heard(member)
    return wanted and member.busy and member.jobs > 0
