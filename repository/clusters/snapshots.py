"""Loads clusters from the database, and converts rows for the planner and for operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from repository.clusters.backoff import backoff_of
from repository.clusters.generations import Generations, GenerationStatus, generations
from repository.clusters.history import present_state, reason_of
from repository.clusters.tables import (
    AssignmentRow,
    BackoffRow,
    ClusterRow,
    ClusterVmRow,
    DemandRow,
    GenerationRow,
    PoolDemandRow,
    PoolRow,
)
from repository.db.models import NodeRow
from repository.db.views import view_of
from vmjobs.cluster.failure_backoff import FailureBackoffs
from vmjobs.cluster.placement import NodeSnapshot, VmRequest
from vmjobs.cluster.pool import ProbeState
from vmjobs.cluster.snapshot import ClusterSnapshot, ClusterVmSnapshot
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Goal, Phase
from vmjobs.cluster.wire import Cluster, ClusterBackoff, ClusterVm, FailedGeneration
from vmjobs.model import HypervisorKind, Node

#: States of probe jobs, by cluster VM and incarnation.
Probes = Mapping[tuple[str, int], ProbeState]


@dataclass(frozen=True)
class Snapshot:
    """All clusters with their VMs, nodes and pools, as they are stored.

    guards: failure backoffs by image and node. generations: beside the present ones. pool_demands: by
    pool.
    """

    clusters: dict[str, ClusterRow]
    vms: dict[str, ClusterVmRow]
    nodes: dict[str, NodeSnapshot]
    pools: dict[str, PoolRow]
    guards: dict[tuple[str, str], BackoffRow] = field(default_factory=dict)
    generations: Generations = field(default_factory=dict)
    demands: dict[str, DemandRow] = field(default_factory=dict)
    pool_demands: dict[str, PoolDemandRow] = field(default_factory=dict)

    def heard(self, row: ClusterVmRow) -> bool:
        """Whether the node of a cluster VM is alive."""
        node = self.nodes.get(row.node)
        return node is not None and node.alive

    def has_unrecorded_changes(self) -> bool:
        """Whether the history lacks a state change of a VM or a backoff."""
        return any(
            row.state != present_state(row, self.heard(row)).value for row in self.vms.values()
        ) or any(row.told != row.until for row in self.guards.values())

    def backoffs(self, present: datetime) -> FailureBackoffs:
        """Convert the failure backoffs for the planner."""
        return FailureBackoffs(map(backoff_of, self.guards.values()), present)

    def images(self) -> dict[str, set[str]]:
        """Return the images of each cluster: of its spec, its VMs and its stored generations."""
        found = {name: {row.image} for name, row in self.clusters.items()}
        for vm in self.vms.values():
            found[vm.cluster].add(vm.image)
        for (name, _), kept in self.generations.items():
            if name in found:
                found[name].add(kept.image)
        return found

    def planner_view(self, probes: Probes) -> list[ClusterSnapshot]:
        """Convert the clusters for the planner."""
        of: dict[str, list[ClusterVmSnapshot]] = defaultdict(list)
        for row in self.vms.values():
            of[row.cluster].append(self.vm_snapshot(row, probes))
        return [
            _cluster(row, self.generations.get((name, GenerationStatus.GOOD)), of[name])
            for name, row in self.clusters.items()
        ]

    def vm_snapshot(self, row: ClusterVmRow, probes: Probes) -> ClusterVmSnapshot:
        """Convert a cluster VM for the planner."""
        pool = self.pools.get(row.pool)
        answers = pool is not None and not pool.problem
        return ClusterVmSnapshot(
            id=row.id,
            name=row.name,
            need=VmRequest(row.cpus, row.memory, row.disk),
            generation=row.generation,
            goal=Goal(row.goal),
            node=row.node,
            phase=Phase(row.phase) if row.phase else None,
            incarnation=row.incarnation,
            admitted=row.admitted,
            condemned=row.condemned,
            failures=row.failures,
            advertised=row.advertised,
            withdrawn=row.withdrawn,
            busy=row.busy,
            probe=probes.get((row.id, row.incarnation)),
            waiting=row.waiting if answers else None,
            image=row.image,
            code=ClusterVmCode(row.code),
            why=row.message,
        )


def load_snapshot(
    session: Session,
    lease: timedelta,
    present: datetime,
    *,
    lock: bool = False,
    planning: bool = True,
) -> Snapshot:
    """Load a snapshot.

    lock: lock clusters, VMs and backoffs until the (write) transaction ends.
    planning: load backoffs, generations and demand, too.
    """
    clusters = select(ClusterRow).order_by(ClusterRow.name)
    vms = select(ClusterVmRow).order_by(ClusterVmRow.id)
    guards = select(BackoffRow).order_by(BackoffRow.image, BackoffRow.node)
    if lock:
        clusters, vms = clusters.with_for_update(), vms.with_for_update()
        guards = guards.with_for_update()
    known = {row.name: row for row in session.scalars(clusters)}
    snapshot = Snapshot(
        known,
        {row.id: row for row in session.scalars(vms) if row.cluster in known},
        nodes_now(session, lease, present),
        {row.name: row for row in session.scalars(select(PoolRow))},
    )
    if planning:
        snapshot.guards.update({(row.image, row.node): row for row in session.scalars(guards)})
        snapshot.generations.update(generations(session))
        demands = session.scalars(select(DemandRow))
        snapshot.demands.update({row.cluster: row for row in demands if row.cluster in known})
        snapshot.pool_demands.update({row.pool: row for row in session.scalars(select(PoolDemandRow))})
    return snapshot


def nodes_now(session: Session, lease: timedelta, present: datetime) -> dict[str, NodeSnapshot]:
    """Return all nodes that ever announced themselves, by name."""
    last_contacts = {
        node: heard
        for node, heard in session.execute(select(AssignmentRow.node, AssignmentRow.heard))
        if heard is not None
    }
    found = {}
    for row in session.scalars(select(NodeRow)):
        node = Node.model_validate(row.description)
        heard = max(row.heard, last_contacts.get(row.name, row.heard))
        found[row.name] = NodeSnapshot(
            name=row.name,
            site=node.site,
            heard=heard,
            alive=present - heard <= lease,
            kinds=frozenset(info.kind for info in node.hypervisors if info.works),
            cpus=node.cluster_cpus,
            memory=node.cluster_memory,
            disk=node.cluster_disk,
        )
    return found


def _cluster(
    row: ClusterRow, good: GenerationRow | None, vms: Iterable[ClusterVmSnapshot]
) -> ClusterSnapshot:
    return ClusterSnapshot(
        name=row.name,
        spec=ClusterSpec.model_validate(row.spec),
        kinds=frozenset(map(HypervisorKind, row.kinds)),
        generation=row.generation,
        target=row.target,
        draining=row.draining,
        deleting=Goal(row.deleting) if row.deleting else None,
        stalled=row.stalled,
        image=row.image,
        good=good.generation if good else 0,
        vms=tuple(vms),
    )


def cluster_view(
    row: ClusterRow,
    up: int,
    members: Sequence[ClusterVm] = (),
    guards: Sequence[ClusterBackoff] = (),
    failed: FailedGeneration | None = None,
) -> Cluster:
    """Convert a cluster for operators."""
    return view_of(
        Cluster,
        row,
        deleting=bool(row.deleting),
        up=up,
        members=members,
        guards=guards,
        failed=failed,
    )


def vm_view(row: ClusterVmRow, heard: bool) -> ClusterVm:
    """Convert a cluster VM for operators."""
    state = present_state(row, heard)
    code, message = reason_of(row, state)
    return view_of(
        ClusterVm,
        row,
        state=state,
        code=code,
        message=message,
        up_since=row.up_since if state is ClusterVmState.UP else None,
        retry=row.retry if state is ClusterVmState.BACKOFF else None,
    )
