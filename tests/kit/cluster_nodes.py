"""Shared by tests of virtual clusters: a simulated pool, and nodes with obedient agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from repository.images import Viewer
from repository.service import Repository
from tests.kit.repository_jobs import clusters_of
from vmjobs.cluster.pool import IdleJobs, PoolVm, ProbeState, WorkerVmProfile
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Goal, Phase
from vmjobs.cluster.wire import (
    ApplyResult,
    Cluster,
    ClusterVm,
    ClusterVmOrder,
    ClusterVmReport,
    ClusterVmReports,
    PoolToken,
)
from vmjobs.errors import Unavailable
from vmjobs.model import HypervisorInfo, HypervisorKind, Node, now

POOLS = {"site": "site.grid schedd.grid grid", "other": "other.grid other.grid grid"}
OPERATOR = Viewer("root", admin=True)
#: Resources of a node with room for more VMs than any test has.
ROOMY = {"cluster_cpus": 100, "cluster_memory": 100000, "cluster_disk": 100000}


class Mint:
    """Makes tokens that state the request."""

    def mint(self, pool: str, machine: PoolVm, seconds: int) -> PoolToken:
        expires, whose = now() + timedelta(seconds=seconds), f"{machine.name} {machine.incarnation}"
        return PoolToken(token=f"{pool} {whose} {seconds}", identity=machine.id, expires=expires)


class Roll:
    """A simulated pool: the VMs that have joined it, and the requests that it received.

    down: it does not answer. probing: the result of probe jobs. calls: number of requests for its VMs.
    waiting: idle jobs by cluster; asked: the profiles of the last such request, by cluster.
    offers: clusters with a VM on offer. there: VMs by name and id of the cluster VM.
    whose: returns the id of the cluster VM that has a name now.
    """

    def __init__(self, whose: Callable[[str], str]) -> None:
        self._whose = whose
        self.there: dict[tuple[str, str], PoolVm] = {}
        self.down = False
        self.probing = ProbeState.RAN
        self.probed: list[set[tuple[str, int]]] = []
        self.withdrawn: list[tuple[str, int]] = []
        self.calls = 0
        self.waiting: dict[str, IdleJobs] = {}
        self.asked: dict[str, WorkerVmProfile] = {}
        self.offers: list[str] = []
        self.weighings = 0

    def _check(self) -> None:
        if self.down:
            raise Unavailable("pool", "the collector site.grid does not answer")

    def vms(self) -> list[PoolVm]:
        self.calls += 1
        self._check()
        return list(self.there.values())

    def probes(self, machines: Sequence[PoolVm]) -> dict[tuple[str, int], ProbeState]:
        self._check()
        asked = {(machine.id, machine.incarnation) for machine in machines}
        self.probed.append(asked)
        return dict.fromkeys(asked, self.probing)

    def withdraw(self, machines: Sequence[PoolVm]) -> None:
        self._check()
        for machine in machines:
            self.withdrawn.append((machine.name, machine.incarnation))
            known = self.there.get((machine.name, machine.id))
            if known is not None and known.incarnation == machine.incarnation:
                del self.there[machine.name, machine.id]

    def idle(self, kinds: Sequence[WorkerVmProfile]) -> dict[str, IdleJobs]:
        self.weighings += 1
        self._check()
        self.asked = {kind.cluster: kind for kind in kinds}
        return {kind.cluster: self.waiting.get(kind.cluster, IdleJobs()) for kind in kinds}

    def offer(self, kinds: Sequence[WorkerVmProfile]) -> None:
        self._check()
        self.offers = [kind.cluster for kind in kinds]

    def wait(self, jobs: int, cluster: str = "vc", **more: Any) -> None:
        """Make this many jobs idle that only this cluster can run, each on a separate VM."""
        self.waiting[cluster] = IdleJobs(jobs, **{"vms": jobs, **more})

    def join(self, name: str, incarnation: int = 1, **more: Any) -> None:
        """Add a VM's ad; by default that of the cluster VM that has this name now."""
        machine = PoolVm(name, incarnation, **{"id": more.get("id") or self._whose(name), **more})
        self.there[name, machine.id] = machine


def declared(name: str = "vc", size: Any = 1, **more: Any) -> ClusterSpec:
    values = {"image": "hep", "memory": 256, "disk": 100, "join_seconds": 60}
    return ClusterSpec.model_validate({"name": name, "size": size, **values, **more})


def node_of(name: str, **more: Any) -> Node:
    """A node with room for four small VMs."""
    values: dict[str, Any] = {
        "cpus": 8,
        "memory": 8192,
        "disk": 100000,
        "site": "here",
        "cluster_cpus": 4,
        "cluster_memory": 1024,
        "cluster_disk": 1000,
        "hypervisors": [HypervisorInfo(kind=HypervisorKind.UML, works=True)],
        "updated": now(),
    }
    return Node.model_validate({"name": name, **values, **more})


class World:
    """A repository with nodes and a pool, and a clock that a test moves."""

    def __init__(self, repository: Repository, *nodes: str, **offers: int) -> None:
        self.repository = repository
        self.pool = Roll(self._id_of)
        self.later = timedelta()
        self.clock: Callable[[], datetime] = lambda: datetime.now(UTC)
        for name in nodes:
            repository.nodes.put(node_of(name, **offers))

    def _id_of(self, name: str) -> str:
        known = [cluster.name for cluster in clusters_of(self.repository)]
        clusters = [self.repository.clusters.get(cluster) for cluster in known]
        return next((m.id for cluster in clusters for m in cluster.members if m.name == name), "")

    def step(self, seconds: float = 0) -> None:
        """Reconcile once, as the worker does, after this many seconds."""
        self.later += timedelta(seconds=seconds)
        self.repository.reconciler.reconcile({"site": self.pool}, self.clock() + self.later)

    def step_killed_after(self, what: Any, name: str) -> None:
        """Reconcile with a worker that is killed right after it has called this function."""
        real = getattr(what, name)

        def killed(*arguments: object) -> None:
            real(*arguments)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(what, name, killed)
            self.step()

    def apply(self, spec: ClusterSpec | None = None, **more: Any) -> ApplyResult:
        return self.repository.cluster_specs.apply(OPERATOR, spec or declared(**more))

    def vms(self, name: str = "vc") -> dict[str, ClusterVm]:
        return {vm.name: vm for vm in self.repository.clusters.get(name).members}

    def states(self, name: str = "vc") -> dict[str, ClusterVmState]:
        return {vm.name: vm.state for vm in self.repository.clusters.get(name).members}

    def orders(self, node: str) -> dict[str, ClusterVmOrder]:
        return {order.name: order for order in self.repository.assignments.get(node).members}

    def report(self, vm: ClusterVm, phase: Phase, incarnation: int = 1, **more: Any) -> None:
        """Report as the agent of the VM's node does."""
        values = {"code": ClusterVmCode.PROGRESS, "since": now(), **more}
        told = ClusterVmReport(id=vm.id, incarnation=incarnation, phase=phase, **values)
        self.repository.assignments.store_reports(vm.node, ClusterVmReports(reports=(told,)))

    def run(self, name: str, incarnation: int = 1, cluster: str = "vc") -> None:
        """Report that a VM runs, and add it to the pool."""
        self._run(self.vms(cluster)[name], incarnation)

    def _run(self, vm: ClusterVm, incarnation: int) -> None:
        self.report(vm, Phase.RUNNING, incarnation)
        self.pool.join(vm.name, incarnation, id=vm.id)

    def bring_up(self) -> None:
        """Report that all ordered VMs run, and add them to the pool."""
        self.step()
        for vm in self.vms().values():
            if vm.node and vm.goal is Goal.RUN and vm.state is not ClusterVmState.UP:
                self._run(vm, vm.incarnation + 1)
        self.step()

    def obey(self, *nodes: str) -> None:
        """Make the agents of these nodes end at once all VMs that have to end."""
        for node in nodes:
            for name, order in self.orders(node).items():
                vm = self.vms(order.cluster)[name]
                if order.goal is not Goal.RUN:
                    self.report(vm, Phase.GONE, vm.incarnation, code=ClusterVmCode.DRAINED)
        self.step()

    def codes(self, name: str = "vc") -> list[tuple[str, str, str]]:
        """The history: cluster VM, state, code."""
        return [(e.member, e.state, e.code) for e in self.repository.clusters.events(name)]


def fail(world: World, name: str, times: int = 3, vc: str = "vc") -> None:
    """Report so many failed incarnations of a VM, one after the other."""
    for number in range(1, times + 1):
        vm = world.vms(vc)[name]
        more = {"failures": number, "code": ClusterVmCode.BOOT_FAILED, "message": "no kernel"}
        world.report(vm, Phase.WAITING, vm.incarnation + 1, **more)


def seen(world: World) -> Cluster:
    """The cluster ``vc``."""
    return world.repository.clusters.get("vc")
