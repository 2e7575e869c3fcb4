"""Queries pools for ads and probe jobs of cluster VMs, outside of transactions."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from time import monotonic
from typing import Final

from sqlalchemy.orm import Session

from repository.clusters.history import Told, record
from repository.clusters.loading import World
from repository.clusters.tables import MAX_SYSTEM, MemberRow, PoolRow
from vmjobs.cluster.member import Goal, Phase
from vmjobs.errors import Unavailable
from vmjobs.ports import Pool, PoolMachine, ProbeState

logger = logging.getLogger(__name__)

#: How often a pool is queried while no VM waits for its ad or probe job.
ASK_EVERY: Final = timedelta(seconds=15)
#: The duration of longer queries is not counted against the VMs' time limits.
SLOW: Final = timedelta(seconds=2)


@dataclass
class Look:
    """The result of querying one pool.

    machines: by name and id of the cluster VM; None: unknown. problem: why a query failed; empty: none
    failed.
    """

    machines: dict[tuple[str, str], PoolMachine] | None = None
    problem: str = ""


@dataclass
class Looks:
    """The results of querying pools, by name, and the states of probe jobs.

    begun: start of the first query, in seconds of the monotonic clock.
    """

    begun: float
    pools: dict[str, Look] = field(default_factory=dict)
    probes: dict[tuple[str, int], ProbeState] = field(default_factory=dict)

    @property
    def delay(self) -> timedelta:
        """Time since the queries began, or 0 if it is short; added to the VMs' time limits."""
        took = timedelta(seconds=monotonic() - self.begun)
        return took if took > SLOW else timedelta()


def ask(world: World, pools: Mapping[str, Pool], present: datetime) -> Looks:
    """Query the pools that are due, and then the probe jobs of their VMs."""
    looks = Looks(monotonic())
    begun = [row for row in world.members.values() if row.incarnation or row.advertised]
    for name in sorted({row.pool for row in begun}):
        mine = [row for row in begun if row.pool == name]
        if _is_time(world.pools.get(name), mine, present):
            looks.pools[name] = _look(name, mine, pools, looks.probes)
    return looks


def _is_time(pool: PoolRow | None, members: Iterable[MemberRow], present: datetime) -> bool:
    if pool is None or present - pool.asked >= ASK_EVERY:
        return True
    # A pool that does not answer costs a time-out each time, for which other pools wait.
    return not pool.problem and any(_awaited(row) for row in members)


def _look(
    name: str,
    members: Sequence[MemberRow],
    pools: Mapping[str, Pool],
    probes: dict[tuple[str, int], ProbeState],
) -> Look:
    pool, look = pools.get(name), Look()
    if pool is None:
        look.problem = f"the pool {name} is not in this service's setting pools any more"
        return look
    try:
        machines = pool.machines()
        look.machines = _newest(machines)
        here = [(row, look.machines.get((row.name, row.id))) for row in members if _awaited(row)]
        if new := [each for row, each in here if each and each.incarnation == row.incarnation]:
            probes.update(pool.probes(new))
    except Unavailable as error:
        look.problem = error.message
    else:
        _withdraw(name, pool, machines, {row.name: row.id for row in members})
    return look


def _newest(machines: Iterable[PoolMachine]) -> dict[tuple[str, str], PoolMachine]:
    found: dict[tuple[str, str], PoolMachine] = {}
    for machine in sorted(machines, key=lambda machine: machine.incarnation):
        found[machine.name, machine.id] = machine
    return found


def _withdraw(
    name: str, pool: Pool, machines: Iterable[PoolMachine], members: Mapping[str, str]
) -> None:
    """Withdraw the ads of earlier VMs whose names other VMs have now."""
    stale = [each for each in machines if members.get(each.name, each.id) != each.id]
    try:
        if stale:
            pool.withdraw(stale)
    except Unavailable as error:
        logger.warning("ads of earlier VMs stay in the pool %s: %s", name, error.message)


def _awaited(row: MemberRow) -> bool:
    """Whether the VM runs and is neither registered nor rejected yet."""
    runs = row.goal == Goal.RUN.value and row.phase == Phase.RUNNING.value
    return runs and row.admitted < row.incarnation and row.condemned < row.incarnation


def is_news(world: World, looks: Looks) -> bool:
    """Whether the results change more than the times of the queries."""
    slow = bool(looks.delay)
    for name, look in looks.pools.items():
        row = world.pools.get(name)
        if row is None or row.problem != look.problem:
            return True
        for member in world.members.values():
            if member.pool != name:
                continue
            if _seen(member, look) != _kept(member) or (slow and member.waiting is not None):
                return True
    return False


def _kept(row: MemberRow) -> tuple[int, bool, int, str]:
    return row.advertised, row.busy, row.jobs, row.system


def _seen(row: MemberRow, look: Look) -> tuple[int, bool, int, str]:
    if look.machines is None:
        return _kept(row)
    machine = look.machines.get((row.name, row.id))
    if machine is None:
        return 0, False, row.jobs, row.system
    return machine.incarnation, machine.busy, machine.jobs, machine.system[:MAX_SYSTEM]


def note_asked(session: Session, looks: Looks, present: datetime) -> None:
    """Store when the pools were queried."""
    for name in looks.pools:
        row = session.get(PoolRow, name)
        if row is not None:
            row.asked = present


def overlay(world: World, looks: Looks, present: datetime) -> list[str]:
    """Apply results to the rows of a snapshot; return pools that begin or cease to answer."""
    turned, delay = [], looks.delay
    for name, look in looks.pools.items():
        row = world.pools.get(name)
        if row is None:
            row = world.pools[name] = PoolRow(name=name, asked=present, problem="")
        before, row.asked, row.problem = row.problem, present, look.problem
        if bool(before) != bool(look.problem):
            turned.append(name)
        for member in world.members.values():
            if member.pool != name:
                continue
            if before and not look.problem and member.waiting is not None:
                member.waiting = present  # time in which the pool did not answer does not count
            _update(member, look, present)
            if member.waiting is not None and delay:
                # A VM that began to wait during the queries gets no more than it has waited.
                member.waiting = min(member.waiting, present) + delay
    return turned


def note(session: Session, world: World, looks: Looks, present: datetime) -> None:
    """Store the results in the rows of a locked snapshot."""
    turned = overlay(world, looks, present)
    session.add_all(world.pools.values())
    for name in turned:
        _tell(session, world, name, looks.pools[name], present)


def _update(row: MemberRow, look: Look, present: datetime) -> None:
    here = row.advertised == row.incarnation
    row.advertised, row.busy, row.jobs, row.system = _seen(row, look)
    if here and row.advertised != row.incarnation and row.phase == Phase.RUNNING.value:
        row.waiting = present


def _tell(session: Session, world: World, name: str, look: Look, present: datetime) -> None:
    told = Told("POOL", "PROGRESS", f"the pool {name} answers again")
    if look.problem:
        told = Told("POOL", "POOL_UNAVAILABLE", look.problem)
    logger.warning("%s", told.message)
    for cluster in sorted({row.cluster for row in world.members.values() if row.pool == name}):
        record(session, world.clusters[cluster], told, present)
