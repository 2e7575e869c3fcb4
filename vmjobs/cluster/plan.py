"""Plans actions for virtual clusters: a pure function of wanted and actual state.

Nothing here does I/O. ``repository/clusters/`` makes the snapshots and takes the actions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import count
from typing import Final

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
from vmjobs.cluster.failure_backoff import FailureBackoffs, FaultSource, fault_source
from vmjobs.cluster.placement import FreeCapacity, NodeSnapshot, PlacementRequest, VmRequest
from vmjobs.cluster.pool import ProbeState
from vmjobs.cluster.snapshot import ClusterSnapshot, ClusterVmSnapshot
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.vm_state import ClusterVmCode, Goal, Phase
from vmjobs.model import HypervisorKind, kinds_with_cpus

#: A generation whose VM ended so often before it was admitted has failed.
MAX_FAILURES: Final = 3
#: A collector drops ads that are older; a restarted collector has received them again by then.
AD_LIFETIME: Final = timedelta(minutes=15)
#: A node that is lost for longer counts as gone, with all its VMs.
NODE_GIVEN_UP_AFTER: Final = timedelta(days=1)


def plan(
    clusters: Iterable[ClusterSnapshot],
    nodes: Mapping[str, NodeSnapshot],
    present: datetime,
    guards: FailureBackoffs | None = None,
) -> list[Action]:
    """Return the actions to take now; the next plan depends on their effects."""
    guards = guards or FailureBackoffs()
    known = sorted(clusters, key=lambda cluster: cluster.name)
    capacity = free_capacity(nodes.values(), known, guards)
    actions: list[Action] = []
    for cluster in known:
        actions += _Planner(cluster, nodes, capacity, present, guards).actions()
    return actions


def free_capacity(
    nodes: Collection[NodeSnapshot],
    clusters: Iterable[ClusterSnapshot],
    guards: FailureBackoffs | None = None,
) -> FreeCapacity:
    """Return what the clusters' VMs leave free on the nodes; ending VMs still use resources."""
    capacity = FreeCapacity(nodes, guards)
    alive = {node.name for node in nodes if node.alive}
    for cluster in clusters:
        for vm in cluster.vms:
            if vm.node and vm.phase is not Phase.GONE:
                capacity.reserve(vm.node, vm.need)
            if vm.node and vm.goal is Goal.RUN:
                capacity.count_vm(vm.node, cluster.name)
                if not vm.proven and vm.node in alive:
                    capacity.note_starting(vm.node, vm.image)
    return capacity


def vm_request(spec: ClusterSpec) -> VmRequest:
    return VmRequest(spec.cpus, spec.memory, spec.disk)


def placement_request(
    spec: ClusterSpec, kinds: frozenset[HypervisorKind], image: str
) -> PlacementRequest:
    """Return the request for one VM. image: its digest; kinds: hypervisors that boot it."""
    can = kinds_with_cpus(spec.cpus, shared=True)
    able = frozenset(kind for kind in kinds if kind in can and spec.hypervisor in {None, kind})
    return PlacementRequest(spec.name, vm_request(spec), able, spec.nodes, spec.site, image)


class _Planner:
    """Plans the actions for one cluster. ``_ended_ids``: VMs that this plan has ended."""

    def __init__(
        self,
        cluster: ClusterSnapshot,
        nodes: Mapping[str, NodeSnapshot],
        capacity: FreeCapacity,
        present: datetime,
        guards: FailureBackoffs,
    ) -> None:
        self._cluster = cluster
        self._guards = guards
        self._nodes = nodes
        self._free_capacity = capacity
        self._present = present
        self._ended_ids: set[str] = set()
        self._request = placement_request(cluster.spec, cluster.kinds, cluster.image)
        taken = {m.name for m in cluster.vms}
        names = (f"{cluster.name}-{n}" for n in count())
        self._names = (name for name in names if name not in taken)

    def actions(self) -> Iterator[Action]:
        """Yield all actions for the cluster."""
        cluster = self._cluster
        if cluster.deleting and not cluster.vms:
            yield DeleteCluster(cluster.name)
            return
        yield from self._endings()
        yield from self._admissions()
        if cluster.deleting or cluster.draining:
            yield from self._end(self._remaining(), cluster.deleting or Goal.DRAIN)
        else:
            yield from self._sizing()

    def _remaining(self) -> list[ClusterVmSnapshot]:
        return [m for m in self._cluster.vms if m.id not in self._ended_ids]

    def _lost_for(self, vm: ClusterVmSnapshot) -> timedelta | None:
        """Return for how long its node has sent no heartbeat; None: it is alive, or there is none."""
        if not vm.node:
            return None
        node = self._nodes.get(vm.node)
        if node is None:
            return NODE_GIVEN_UP_AFTER
        return None if node.alive else self._present - node.heard

    # -- VMs that have ended

    def _endings(self) -> Iterator[Action]:
        for vm in self._cluster.vms:
            if self._has_ended(vm):
                self._ended_ids.add(vm.id)
                yield DeleteVm(vm.id)
            elif vm.ended > vm.withdrawn or _has_stale_ad(vm):
                yield RemoveAd(vm.id)

    def _has_ended(self, vm: ClusterVmSnapshot) -> bool:
        if vm.phase is Phase.GONE or (not vm.node and vm.goal is not Goal.RUN):
            return True
        lost = self._lost_for(vm)
        if lost is None or vm.goal is Goal.RUN:
            return False
        # The order cannot reach the VM now. If its node returns, it gets the order at once.
        drained = lost > timedelta(seconds=self._cluster.spec.drain_seconds)
        return vm.goal is Goal.STOP or drained

    def _end(self, vms: Iterable[ClusterVmSnapshot], goal: Goal) -> Iterator[Action]:
        """End VMs; delete those without a node at once."""
        later = list(Goal)
        for vm in vms:
            self._ended_ids.add(vm.id)
            if not vm.node:
                yield DeleteVm(vm.id)
            elif later.index(vm.goal) < later.index(goal):
                yield SetGoal(vm.id, goal)

    # -- VMs that run

    def _admissions(self) -> Iterator[Action]:
        for vm in self._remaining():
            runs = vm.goal is Goal.RUN and vm.phase is Phase.RUNNING
            if not runs or vm.up or vm.condemned >= vm.incarnation:
                continue
            if vm.joined and vm.probe is ProbeState.RAN:
                yield AllowJobs(vm.id, vm.incarnation)
            elif vm.joined and vm.probe is ProbeState.FAILED:
                why = "its probe job failed: the VM is in the pool but runs no jobs"
                yield ReplaceVm(vm.id, vm.incarnation, ClusterVmCode.PROBE_FAILED, why)
            elif vm.waiting is not None:
                yield from self._join_timeout(vm, self._present - vm.waiting)

    def _join_timeout(self, vm: ClusterVmSnapshot, waited: timedelta) -> Iterator[Action]:
        limit = timedelta(seconds=self._cluster.spec.join_seconds)
        if vm.proven:
            limit = max(limit, AD_LIFETIME)
        if waited <= limit:
            return
        seconds = int(limit.total_seconds())
        if vm.proven:
            why = f"the VM has been missing from the pool for {seconds} s"
        elif vm.joined:
            why = f"its probe job did not run within {seconds} s"
        else:
            why = f"the VM did not join the pool within {seconds} s"
        yield ReplaceVm(vm.id, vm.incarnation, ClusterVmCode.JOIN_TIMED_OUT, why)

    # -- how many, where, and of which generation

    def _sizing(self) -> Iterator[Action]:
        cluster = self._cluster
        run = [m for m in self._remaining() if m.goal is Goal.RUN]
        given_up = [m for m in run if (self._lost_for(m) or timedelta()) >= NODE_GIVEN_UP_AFTER]
        outdated = [m for m in run if not m.node and m.generation != cluster.generation]
        yield from self._end([*given_up, *outdated], Goal.DRAIN)
        run = [m for m in run if m.id not in self._ended_ids]
        lost = [m for m in run if self._lost_for(m) is not None]
        there = [m for m in run if self._lost_for(m) is None]
        surplus = len(there) - cluster.target
        if surplus > 0:
            victims = sorted(there, key=self._expendability)[:surplus]
            yield from self._end(victims, Goal.DRAIN)
        yield from self._places(m for m in there if not m.node and m.id not in self._ended_ids)
        if surplus <= 0:
            yield from self._moves(there)
        if surplus < 0:
            yield from self._creations(-surplus, len(lost))
        elif surplus == 0:
            yield from self._replacement(there, lost)

    def _expendability(self, vm: ClusterVmSnapshot) -> tuple[bool, bool, bool, bool, bool, int]:
        """Return a sort key: the most expendable VM comes first."""
        return (
            bool(vm.node),
            vm.phase is not Phase.WAITING,
            vm.up,
            vm.busy,
            vm.generation == self._cluster.generation,
            -vm.number,
        )

    def _places(self, vms: Iterable[ClusterVmSnapshot]) -> Iterator[Action]:
        for vm in sorted(vms, key=lambda m: m.number):
            place = self._free_capacity.place(self._request)
            if place.node:
                yield AssignNode(vm.id, place.node)
            elif (place.code, place.why) != (vm.code, vm.why):
                yield SetPending(vm.id, place.code, place.why)

    def _creations(self, missing: int, lost: int) -> Iterator[Action]:
        """Create missing VMs; replace lost ones only if a node has capacity now."""
        for made in range(missing):
            place = self._free_capacity.place(self._request)
            if not place.node and made >= missing - lost:
                return
            yield CreateVm(self._cluster.name, next(self._names), place)

    def _moves(self, there: Sequence[ClusterVmSnapshot]) -> Iterator[Action]:
        """Replace VMs that keep failing on their node by new ones on other nodes with capacity."""
        for vm in there:
            closed = self._guards.closed(vm.image, vm.node)
            if vm.phase is not Phase.WAITING or not closed or not self._is_movable(vm, there):
                continue
            if (
                vm.id not in self._ended_ids
                and (place := self._free_capacity.place(self._request)).node
            ):
                yield from self._end([vm], Goal.DRAIN)
                yield CreateVm(self._cluster.name, next(self._names), place)

    def _is_movable(self, vm: ClusterVmSnapshot, there: Sequence[ClusterVmSnapshot]) -> bool:
        """Whether the node may be at fault, rather than a changed declaration."""
        generation = self._cluster.generation
        if vm.generation != generation:
            return False
        if self._cluster.good in {0, generation} and all(m.generation == generation for m in there):
            return True
        source = fault_source(vm.code)
        untried = source is FaultSource.PAIR and not self._guards.of(vm.image).proven
        proven = any(m.admitted for m in there if m.generation == generation)
        return untried or proven or source is FaultSource.NODE

    def _replacement(
        self, there: Sequence[ClusterVmSnapshot], lost: Sequence[ClusterVmSnapshot]
    ) -> Iterator[Action]:
        """End one VM of an old generation if all others are up; a new one replaces it."""
        cluster = self._cluster
        old = [m for m in there if m.generation != cluster.generation]
        new = [m for m in there if m.generation == cluster.generation]
        failing = [
            m for m in new if m.id not in self._ended_ids and not m.up and m.failures >= MAX_FAILURES
        ]
        under_way = old or not any(m.admitted for m in new)
        if failing and under_way and cluster.good not in {0, cluster.generation}:
            yield RollBack(cluster.name, _rollback_reason(failing[0], cluster))
            yield from self._end([m for m in new if not m.admitted], Goal.DRAIN)
            return
        if not old:
            if new and not lost and all(m.up for m in new) and cluster.good != cluster.generation:
                yield CompleteRollout(cluster.name)
            return
        if failing:
            if cluster.stalled != cluster.generation:
                yield PauseRollout(
                    cluster.name, _pause_reason(failing[0], cluster.generation, len(old))
                )
            return
        ending = [
            m
            for m in self._remaining()
            if m.goal is not Goal.RUN
            and m.generation != cluster.generation
            and self._lost_for(m) is None
        ]
        once_up = [m for m in (*old, *lost) if m.admitted]
        # VMs that never were up do not block a rollout that may repair them.
        if ending or not all(m.up and m not in lost for m in (*new, *once_up)):
            return
        yield from self._end([min(old, key=self._expendability)], Goal.DRAIN)


def _has_stale_ad(vm: ClusterVmSnapshot) -> bool:
    """Whether the pool has the ad of an ended incarnation.

    A VM may also join the pool before its agent has reported it as running.
    """
    return vm.phase is not None and 0 < vm.advertised <= vm.ended


def _rollback_reason(vm: ClusterVmSnapshot, cluster: ClusterSnapshot) -> str:
    failure = f"{vm.name} failed {vm.failures} times: {_why(vm)}"
    return f"generation {cluster.generation} failed ({failure}): back to generation {cluster.good}"


def _why(vm: ClusterVmSnapshot) -> str:
    return f"{vm.code}: {vm.why}" if vm.why else vm.code


def _pause_reason(vm: ClusterVmSnapshot, generation: int, old: int) -> str:
    return (
        f"the rollout is paused: {vm.name} of generation {generation} failed "
        f"{vm.failures} times ({_why(vm)}); "
        f"{old} of earlier generations stay. Correct the declaration, or apply the earlier one again"
    )
