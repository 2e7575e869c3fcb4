"""The reconciler: brings clusters from their actual state to their wanted state.

It queries pools before it locks anything. Then one short transaction reads again, plans, and writes.
If the process is killed in between, its requests to a pool do no harm, and are repeated.
"""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Final

from sqlalchemy.orm import Session

from repository.clusters import guarding, weighing
from repository.clusters import pools as looking
from repository.clusters.core import ClusterCore
from repository.clusters.generations import keep_good, roll_back
from repository.clusters.history import Told, enter, follow, record
from repository.clusters.loading import World, load
from repository.clusters.pools import Looks
from repository.clusters.sharing import bump
from repository.clusters.tables import ClusterEventRow, ClusterRow, MemberRow
from repository.clusters.weighing import Weighed
from vmjobs.cluster.actions import (
    Action,
    Admit,
    Condemn,
    Create,
    Forget,
    Keep,
    Place,
    Remove,
    RollBack,
    SetGoal,
    SetPending,
    Stall,
    Withdraw,
)
from vmjobs.cluster.member import Goal, MemberCode, MemberState
from vmjobs.cluster.placement import Placement
from vmjobs.cluster.plan import plan
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.wire import MemberOrder, PoolAddress
from vmjobs.errors import NotFound, Unavailable, VMJobsError
from vmjobs.model import now as utc_now
from vmjobs.ports import Pool, PoolMachine

logger = logging.getLogger(__name__)

#: Incarnations whose ads were withdrawn from the pools, by id of the cluster VM.
Withdrawn = Mapping[str, Collection[int]]
#: The number of last incarnations whose ads are withdrawn; tokens of earlier ones have expired.
MOST_TOLD: Final = 64


class Reconciling(ClusterCore):
    """The part that the worker calls."""

    def reconcile(self, pools: Mapping[str, Pool], present: datetime | None = None) -> None:
        """Reconcile once. pools: by name; a pool that does not answer does not delay the others.

        The caller holds a lock, so that no other process reconciles at the same time.
        """
        present = present or utc_now()
        with self.database.read() as session:
            world = load(session, self.lease, present)
        if not world.clusters and not any(row.offers for row in world.weighed.values()):
            return
        looks = looking.ask(world, pools, present)
        weighed = weighing.ask(self, world, pools, present)
        news = looking.is_news(world, looks)
        looking.overlay(world, looks, present)
        actions = plan(world.planned(looks.probes), world.nodes, present, world.guarded(present))
        withdrawn = _withdraw(actions, world, pools)
        if actions or news or weighed or world.moved():
            for member in self._write(looks, weighed, withdrawn, present):
                self._drop_consoles(member)  # an agent may have sent more meanwhile
        elif looks.pools:
            with self.database.write() as session:
                looking.note_asked(session, looks, present)

    def _write(
        self, looks: Looks, weighed: Mapping[str, Weighed], withdrawn: Withdrawn, present: datetime
    ) -> list[str]:
        """Store results, plan and carry out, in one transaction; return the VMs that were deleted."""
        with self.database.write() as session:
            world = load(session, self.lease, present, lock=True)
            looking.note(session, world, looks, present)
            weighing.note(self, session, world, weighed, present)
            _follow(session, world, present)
            actions = plan(world.planned(looks.probes), world.nodes, present, world.guarded(present))
            doing = _Doing(self, session, world, withdrawn, present)
            for action in actions:
                doing.carry_out(action)
            _follow(session, world, present)
            _watch(session, world, present)
            for node in sorted(doing.nodes):
                bump(session, node)
            session.flush()
            # Before the commit: a process killed after it leaves no consoles without a row.
            for member in doing.forgotten:
                self._drop_consoles(member)
            return doing.forgotten

    def _drop_consoles(self, member: str) -> None:
        try:
            self.streams.drop(member)
        except VMJobsError as error:
            logger.warning("cannot remove the consoles of the VM %s: %s", member, error.message)


class _Doing:
    """Carries out a plan within one transaction, in which clusters and VMs are locked.

    withdrawn: ads withdrawn from the pools. nodes: nodes whose assignment changes.
    """

    def __init__(
        self,
        core: ClusterCore,
        session: Session,
        world: World,
        withdrawn: Withdrawn,
        present: datetime,
    ) -> None:
        self._core = core
        self._session = session
        self._world = world
        self._withdrawn = withdrawn
        self._present = present
        self.forgotten: list[str] = []
        self.nodes: set[str] = set()

    def carry_out(self, action: Action) -> None:
        """Carry out one action."""
        match action:
            case Create():
                self._create(action)
            case Place(member, node):
                row = self._world.members[member]
                row.node, row.code, row.message = node, MemberCode.PROGRESS.value, ""
                self.nodes.add(node)
            case SetPending(member, code, why):
                row = self._world.members[member]
                changed, row.code, row.message = row.code != code.value, code.value, why
                if changed:
                    self._tell(row, Told(row.state, code.value, why))
            case SetGoal(member, goal):
                row = self._world.members[member]
                row.goal = goal.value
                self.nodes.add(row.node)
            case Admit(member, incarnation):
                row = self._world.members[member]
                row.admitted, row.waiting = incarnation, None
                guarding.note_success(self._session, self._world.guards, row.image, row.node)
                self.nodes.add(row.node)
            case Condemn():
                self._condemn(action)
            case Withdraw(member):
                if (machines := self._withdrawn.get(member)) is not None:
                    row = self._world.members[member]
                    # If the first plan was to delete the VM, its next incarnation was withdrawn, too.
                    known = [machine for machine in machines if machine <= row.incarnation]
                    row.withdrawn = max([row.withdrawn, *known])
                    if row.advertised in machines:
                        row.advertised = 0
            case Forget(member):
                self._forget(member)
            case Stall() | Keep() | RollBack() | Remove():
                self._turn(action)

    def _turn(self, action: Stall | Keep | RollBack | Remove) -> None:
        session, generations = self._session, self._world.generations
        row = self._world.clusters[action.cluster]
        match action:
            case Stall(_, why):
                row.stalled = row.generation
                record(session, row, Told("STALLED", "REPLACEMENT_FAILED", why), self._present)
            case Keep():
                keep_good(session, generations, row, self._present)
            case RollBack(_, why):
                roll_back(session, generations, row, why, self._present)
            case Remove(name):
                session.delete(self._world.clusters.pop(name))

    def _create(self, action: Create) -> None:
        cluster = self._world.clusters[action.cluster]
        try:
            address = self._core.address(ClusterSpec.model_validate(cluster.spec).pool)
        except NotFound as error:
            self._say_once(cluster, Told("NO_POOL", "NO_POOL", f"no VMs are created: {error.message}"))
            return
        row = _member(cluster, address, action.name, action.place, self._present)
        self._session.add(row)
        self._world.members[row.id] = row
        self._enter(row, MemberState(row.state))
        if row.node:
            self.nodes.add(row.node)

    def _say_once(self, cluster: ClusterRow, told: Told) -> None:
        """Add a line to the cluster's history, unless it is the last one there."""
        last = self._session.get(ClusterEventRow, (cluster.name, cluster.events_count))
        if last is None or (last.code, last.message) != (told.code, told.message):
            record(self._session, cluster, told, self._present)
            self._session.flush()

    def _condemn(self, action: Condemn) -> None:
        row = self._world.members[action.member]
        row.condemned = action.incarnation
        row.why, row.why_message = action.code.value, action.why
        self.nodes.add(row.node)
        self._tell(row, Told(row.state, action.code.value, action.why))

    def _forget(self, member: str) -> None:
        row = self._world.members[member]
        if _of_pool(row) and row.incarnation + 1 not in self._withdrawn.get(member, ()):
            return  # the pool does not answer now, and would go on to match jobs to its ad
        if row.state != MemberState.GONE.value:
            self._enter(row, MemberState.GONE)
        if row.node:
            self.nodes.add(row.node)
        self._session.delete(row)
        self.forgotten.append(member)
        del self._world.members[member]

    def _enter(self, row: MemberRow, state: MemberState) -> None:
        told = Told(state.value, row.code, row.message)
        enter(self._session, self._world.clusters[row.cluster], row, told, self._present)

    def _tell(self, row: MemberRow, told: Told) -> None:
        record(self._session, self._world.clusters[row.cluster], told, self._present, row)


def _follow(session: Session, world: World, present: datetime) -> None:
    for row in world.members.values():
        follow(session, world.clusters[row.cluster], row, world.heard(row), present)


def _watch(session: Session, world: World, present: datetime) -> None:
    """Record backoffs that began or ended, and delete those of images without a cluster."""
    concerned: dict[str, list[ClusterRow]] = defaultdict(list)
    for name, images in world.images().items():
        for image in images:
            concerned[image].append(world.clusters[name])
    guarding.tell(session, world.guards.values(), concerned, present)
    for row in world.guards.values():
        if row.image not in concerned:
            session.delete(row)


def _withdraw(actions: Iterable[Action], world: World, pools: Mapping[str, Pool]) -> Withdrawn:
    """Withdraw ads of VMs that ended from the pools; return what was withdrawn."""
    over = {a.member: _over(world, a) for a in actions if isinstance(a, Withdraw | Forget)}
    rows = [world.members[member] for member in over if _of_pool(world.members[member])]
    done: dict[str, Collection[int]] = {}
    for name in sorted({row.pool for row in rows}):
        mine = [row for row in rows if row.pool == name]
        pool = pools.get(name)
        if pool is not None and name in world.pools and world.pools[name].problem:
            continue
        try:
            if pool is not None:
                pool.withdraw([PoolMachine(r.name, n, r.id) for r in mine for n in over[r.id]])
        except Unavailable as error:
            logger.warning("ads of VMs that ended stay in the pool %s: %s", name, error.message)
        else:
            done |= {row.id: over[row.id] for row in mine}
    return done


def _over(world: World, action: Withdraw | Forget) -> set[int]:
    """Return the incarnations that have ended and whose ads the pool may still have."""
    row = world.members[action.member]
    # An agent may have got a token for an incarnation that it never reported.
    last = row.incarnation + 1 if isinstance(action, Forget) else world.member(row, {}).ended
    over = set(range(max(1, row.withdrawn + 1, last - MOST_TOLD + 1), last + 1))
    return over | {row.advertised} if 0 < row.advertised <= last else over


def _of_pool(row: MemberRow) -> bool:
    """Whether the pool may have an ad or a probe job of the VM."""
    return row.incarnation > 0 or row.advertised > 0


def _member(
    cluster: ClusterRow, pool: PoolAddress, name: str, place: Placement, present: datetime
) -> MemberRow:
    spec = ClusterSpec.model_validate(cluster.spec)
    order = MemberOrder(
        id=uuid.uuid4().hex,
        cluster=cluster.name,
        name=name,
        goal=Goal.RUN,
        image=cluster.image,
        cpus=spec.cpus,
        memory=spec.memory,
        disk=spec.disk,
        hypervisor=spec.hypervisor,
        network=spec.network,
        pool=pool,
        attributes=spec.attributes,
        start=spec.start,
        limits=spec.limits,
        lifecycle=spec.lifecycle,
        boot_seconds=spec.boot_seconds,
        drain_seconds=spec.drain_seconds,
    )
    state = MemberState.ASSIGNED if place.node else MemberState.PENDING
    return MemberRow(
        id=order.id,
        cluster=cluster.name,
        name=name,
        generation=cluster.generation,
        image=cluster.image,
        orders=order.model_dump(mode="json"),
        pool=pool.name,
        cpus=spec.cpus,
        memory=spec.memory,
        disk=spec.disk,
        created=present,
        node=place.node,
        goal=Goal.RUN.value,
        admitted=0,
        condemned=0,
        why=MemberCode.PROGRESS.value,
        why_message="",
        phase="",
        incarnation=0,
        code=place.code.value,
        message=place.why,
        failures=0,
        advertised=0,
        busy=False,
        jobs=0,
        system="",
        state=state.value,
        since=present,
    )
