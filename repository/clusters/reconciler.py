"""The reconciler: brings clusters from their actual state to their wanted state.

It queries pools before it locks anything. Then one short transaction reads again, plans, and writes.
If the process is killed in between, its requests to a pool do no harm, and are repeated.
"""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from sqlalchemy.orm import Session

from repository.clusters import autoscaling, backoff
from repository.clusters import pools as polling
from repository.clusters.assignments import bump_revision
from repository.clusters.autoscaling import PoolDemand
from repository.clusters.core import node_lease, pool_address
from repository.clusters.generations import keep_good, roll_back
from repository.clusters.history import HistoryEntry, record, record_state_entry, update_state
from repository.clusters.pools import Pool, PoolPolls
from repository.clusters.snapshots import Snapshot, load_snapshot
from repository.clusters.tables import ClusterEventRow, ClusterRow, ClusterVmRow
from repository.db.database import Database
from repository.jobs.streams import StreamStore
from vmjobs.cluster.actions import (
    Action,
    AllowJobs,
    AssignNode,
    CompleteRollout,
    CreateVm,
    DeleteCluster,
    DeleteVm,
    PauseRollout,
    RemoveAd,
    ReplaceVm,
    RollBack,
    SetGoal,
    SetPending,
)
from vmjobs.cluster.placement import Placement
from vmjobs.cluster.plan import plan
from vmjobs.cluster.pool import PoolVm
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Goal
from vmjobs.cluster.wire import ClusterVmOrder, PoolAddress
from vmjobs.config import Config
from vmjobs.errors import NotFound, Unavailable, VMJobsError
from vmjobs.model import now as utc_now

logger = logging.getLogger(__name__)

#: Incarnations whose ads were withdrawn from the pools, by id of the cluster VM.
WithdrawnAds = Mapping[str, Collection[int]]
#: The number of last incarnations whose ads are withdrawn; tokens of earlier ones have expired.
MAX_WITHDRAWN: Final = 64


@dataclass(frozen=True)
class ClusterReconciler:
    """Reconciles all clusters, for the worker."""

    database: Database
    streams: StreamStore
    config: Config

    def reconcile(self, pools: Mapping[str, Pool], present: datetime | None = None) -> None:
        """Reconcile once. pools: by name; a pool that does not answer does not delay the others.

        The caller holds a lock, so that no other process reconciles at the same time.
        """
        present = present or utc_now()
        with self.database.read() as session:
            snapshot = load_snapshot(session, node_lease(self.config), present)
        if not snapshot.clusters and not any(row.offers for row in snapshot.pool_demands.values()):
            return
        polls = polling.poll_pools(snapshot, pools, present)
        pool_demands = autoscaling.query_demand(self.config, snapshot, pools, present)
        news = polling.has_changes(snapshot, polls)
        polling.apply_polls(snapshot, polls, present)
        actions = plan(
            snapshot.planner_view(polls.probes), snapshot.nodes, present, snapshot.backoffs(present)
        )
        withdrawn = _withdraw_ads(actions, snapshot, pools)
        if actions or news or pool_demands or snapshot.has_unrecorded_changes():
            for vm in self._write(polls, pool_demands, withdrawn, present):
                self._drop_consoles(vm)  # an agent may have sent more meanwhile
        elif polls.pools:
            with self.database.write() as session:
                polling.record_poll_times(session, polls, present)

    def _write(
        self,
        polls: PoolPolls,
        pool_demands: Mapping[str, PoolDemand],
        withdrawn: WithdrawnAds,
        present: datetime,
    ) -> list[str]:
        """Store results, plan and carry out, in one transaction; return the VMs that were deleted."""
        with self.database.write() as session:
            snapshot = load_snapshot(session, node_lease(self.config), present, lock=True)
            polling.record_polls(session, snapshot, polls, present)
            autoscaling.store_demand(self.config, session, snapshot, pool_demands, present)
            _update_states(session, snapshot, present)
            actions = plan(
                snapshot.planner_view(polls.probes), snapshot.nodes, present, snapshot.backoffs(present)
            )
            executor = _ActionExecutor(self.config, session, snapshot, withdrawn, present)
            for action in actions:
                executor.carry_out(action)
            _update_states(session, snapshot, present)
            _record_backoffs(session, snapshot, present)
            for node in sorted(executor.nodes):
                bump_revision(session, node)
            session.flush()
            # Before the commit: a process killed after it leaves no consoles without a row.
            for vm in executor.forgotten:
                self._drop_consoles(vm)
            return executor.forgotten

    def _drop_consoles(self, vm: str) -> None:
        try:
            self.streams.drop(vm)
        except VMJobsError as error:
            logger.warning("cannot remove the consoles of the VM %s: %s", vm, error.message)


@dataclass(frozen=True)
class _ActionExecutor:
    """Carries out a plan within one transaction, in which clusters and VMs are locked.

    withdrawn: ads withdrawn from the pools. nodes: nodes whose assignment changes.
    """

    config: Config
    session: Session
    snapshot: Snapshot
    withdrawn: WithdrawnAds
    present: datetime
    forgotten: list[str] = field(default_factory=list)
    nodes: set[str] = field(default_factory=set)

    def carry_out(self, action: Action) -> None:
        match action:
            case CreateVm():
                self._create(action)
            case AssignNode(vm, node):
                row = self.snapshot.vms[vm]
                row.node, row.code, row.message = node, ClusterVmCode.PROGRESS.value, ""
                self.nodes.add(node)
            case SetPending(vm, code, why):
                row = self.snapshot.vms[vm]
                changed, row.code, row.message = row.code != code.value, code.value, why
                if changed:
                    self._record(row, HistoryEntry(row.state, code.value, why))
            case SetGoal(vm, goal):
                row = self.snapshot.vms[vm]
                row.goal = goal.value
                self.nodes.add(row.node)
            case AllowJobs(vm, incarnation):
                row = self.snapshot.vms[vm]
                row.admitted, row.waiting = incarnation, None
                backoff.record_success(self.session, self.snapshot.guards, row.image, row.node)
                self.nodes.add(row.node)
            case ReplaceVm():
                self._replace(action)
            case RemoveAd(vm):
                if (vms := self.withdrawn.get(vm)) is not None:
                    row = self.snapshot.vms[vm]
                    # If the first plan was to delete the VM, its next incarnation was withdrawn, too.
                    known = [vm for vm in vms if vm <= row.incarnation]
                    row.withdrawn = max([row.withdrawn, *known])
                    if row.advertised in vms:
                        row.advertised = 0
            case DeleteVm(vm):
                self._forget(vm)
            case PauseRollout() | CompleteRollout() | RollBack() | DeleteCluster():
                self._change_generation(action)

    def _change_generation(
        self, action: PauseRollout | CompleteRollout | RollBack | DeleteCluster
    ) -> None:
        session, generations = self.session, self.snapshot.generations
        row = self.snapshot.clusters[action.cluster]
        match action:
            case PauseRollout(_, why):
                row.stalled = row.generation
                record(session, row, HistoryEntry("STALLED", "REPLACEMENT_FAILED", why), self.present)
            case CompleteRollout():
                keep_good(session, generations, row, self.present)
            case RollBack(_, why):
                roll_back(session, generations, row, why, self.present)
            case DeleteCluster(name):
                session.delete(self.snapshot.clusters.pop(name))

    def _create(self, action: CreateVm) -> None:
        cluster = self.snapshot.clusters[action.cluster]
        try:
            address = pool_address(self.config, ClusterSpec.model_validate(cluster.spec).pool)
        except NotFound as error:
            self._record_once(
                cluster, HistoryEntry("NO_POOL", "NO_POOL", f"no VMs are created: {error.message}")
            )
            return
        row = _new_vm(cluster, address, action.name, action.place, self.present)
        self.session.add(row)
        self.snapshot.vms[row.id] = row
        self._enter_state(row, ClusterVmState(row.state))
        if row.node:
            self.nodes.add(row.node)

    def _record_once(self, cluster: ClusterRow, entry: HistoryEntry) -> None:
        """Add a line to the cluster's history, unless it is the last one there."""
        last = self.session.get(ClusterEventRow, (cluster.name, cluster.events_count))
        if last is None or (last.code, last.message) != (entry.code, entry.message):
            record(self.session, cluster, entry, self.present)
            self.session.flush()

    def _replace(self, action: ReplaceVm) -> None:
        row = self.snapshot.vms[action.vm]
        row.condemned = action.incarnation
        row.why, row.why_message = action.code.value, action.why
        self.nodes.add(row.node)
        self._record(row, HistoryEntry(row.state, action.code.value, action.why))

    def _forget(self, vm: str) -> None:
        row = self.snapshot.vms[vm]
        if _may_have_ads(row) and row.incarnation + 1 not in self.withdrawn.get(vm, ()):
            return  # the pool does not answer now, and would go on to match jobs to its ad
        if row.state != ClusterVmState.GONE.value:
            self._enter_state(row, ClusterVmState.GONE)
        if row.node:
            self.nodes.add(row.node)
        self.session.delete(row)
        self.forgotten.append(vm)
        del self.snapshot.vms[vm]

    def _enter_state(self, row: ClusterVmRow, state: ClusterVmState) -> None:
        entry = HistoryEntry(state.value, row.code, row.message)
        record_state_entry(self.session, self.snapshot.clusters[row.cluster], row, entry, self.present)

    def _record(self, row: ClusterVmRow, entry: HistoryEntry) -> None:
        record(self.session, self.snapshot.clusters[row.cluster], entry, self.present, row)


def _update_states(session: Session, snapshot: Snapshot, present: datetime) -> None:
    for row in snapshot.vms.values():
        update_state(session, snapshot.clusters[row.cluster], row, snapshot.heard(row), present)


def _record_backoffs(session: Session, snapshot: Snapshot, present: datetime) -> None:
    """Record backoffs that began or ended, and delete those of images without a cluster."""
    concerned: dict[str, list[ClusterRow]] = defaultdict(list)
    for name, images in snapshot.images().items():
        for image in images:
            concerned[image].append(snapshot.clusters[name])
    backoff.record_changes(session, snapshot.guards.values(), concerned, present)
    for row in snapshot.guards.values():
        if row.image not in concerned:
            session.delete(row)


def _withdraw_ads(
    actions: Iterable[Action], snapshot: Snapshot, pools: Mapping[str, Pool]
) -> WithdrawnAds:
    """Withdraw ads of VMs that ended from the pools; return what was withdrawn."""
    ended = {
        a.vm: _ended_incarnations(snapshot, a) for a in actions if isinstance(a, RemoveAd | DeleteVm)
    }
    rows = [snapshot.vms[vm] for vm in ended if _may_have_ads(snapshot.vms[vm])]
    done: dict[str, Collection[int]] = {}
    for name in sorted({row.pool for row in rows}):
        mine = [row for row in rows if row.pool == name]
        pool = pools.get(name)
        if pool is not None and name in snapshot.pools and snapshot.pools[name].problem:
            continue
        try:
            if pool is not None:
                pool.withdraw([PoolVm(r.name, n, r.id) for r in mine for n in ended[r.id]])
        except Unavailable as error:
            logger.warning("ads of VMs that ended stay in the pool %s: %s", name, error.message)
        else:
            done |= {row.id: ended[row.id] for row in mine}
    return done


def _ended_incarnations(snapshot: Snapshot, action: RemoveAd | DeleteVm) -> set[int]:
    """Return the incarnations that have ended and whose ads the pool may still have."""
    row = snapshot.vms[action.vm]
    # An agent may have got a token for an incarnation that it never reported.
    last = row.incarnation + 1 if isinstance(action, DeleteVm) else snapshot.vm_snapshot(row, {}).ended
    ended = set(range(max(1, row.withdrawn + 1, last - MAX_WITHDRAWN + 1), last + 1))
    return ended | {row.advertised} if 0 < row.advertised <= last else ended


def _may_have_ads(row: ClusterVmRow) -> bool:
    """Whether the pool may have an ad or a probe job of the VM."""
    return row.incarnation > 0 or row.advertised > 0


def _new_vm(
    cluster: ClusterRow, pool: PoolAddress, name: str, place: Placement, present: datetime
) -> ClusterVmRow:
    spec = ClusterSpec.model_validate(cluster.spec)
    order = ClusterVmOrder(
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
    state = ClusterVmState.ASSIGNED if place.node else ClusterVmState.PENDING
    return ClusterVmRow(
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
        why=ClusterVmCode.PROGRESS.value,
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
