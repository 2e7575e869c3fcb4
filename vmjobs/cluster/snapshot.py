"""Snapshots of clusters and their VMs, the input of a plan. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from vmjobs.cluster.placement import VmRequest
from vmjobs.cluster.pool import ProbeState
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.vm_state import ClusterVmCode, Goal, Phase
from vmjobs.model import HypervisorKind


@dataclass(frozen=True)
class ClusterVmSnapshot:
    """A cluster VM: its order, its agent's report, and its pool's view.

    node: empty: it has none yet. generation: of the declaration that it was created by.
    withdrawn: the last incarnation whose ad was removed from the pool.
    admitted, condemned: the last such incarnation. advertised: the incarnation whose ad the collector
    has; 0: none. probe: state of the present incarnation's probe job; None: unknown.
    waiting: since when its ad or probe job is missing; None: the pool does not answer, so the VM is
    not to blame.
    code, why: why it has no node.
    """

    id: str
    name: str
    need: VmRequest
    generation: int
    goal: Goal = Goal.RUN
    node: str = ""
    phase: Phase | None = None
    incarnation: int = 0
    admitted: int = 0
    condemned: int = 0
    failures: int = 0
    advertised: int = 0
    withdrawn: int = 0
    busy: bool = False
    probe: ProbeState | None = None
    waiting: datetime | None = None
    image: str = ""
    code: ClusterVmCode = ClusterVmCode.PROGRESS
    why: str = ""

    @property
    def number(self) -> int:
        """The number N of its name ``CLUSTER-N``."""
        return int(self.name.rpartition("-")[2])

    @property
    def ended(self) -> int:
        """The last incarnation that has ended; 0: none has."""
        over = self.phase in {Phase.WAITING, Phase.GONE}
        return self.incarnation if over else max(0, self.incarnation - 1)

    @property
    def joined(self) -> bool:
        return self.incarnation > 0 and self.advertised == self.incarnation

    @property
    def proven(self) -> bool:
        """Whether a probe job ran in its present incarnation."""
        return self.incarnation > 0 and self.admitted == self.incarnation

    @property
    def up(self) -> bool:
        """Whether it runs and accepts jobs, by the last reports; its node may be lost."""
        return self.phase is Phase.RUNNING and self.joined and self.proven


@dataclass(frozen=True)
class ClusterSnapshot:
    """A cluster and its VMs.

    kinds: hypervisors that boot its image. deleting: the goal, if it is being deleted. stalled: the
    generation whose rollout is paused. good: the last generation that was fully up; 0: none.
    """

    name: str
    spec: ClusterSpec
    kinds: frozenset[HypervisorKind]
    generation: int
    target: int
    draining: bool = False
    deleting: Goal | None = None
    stalled: int = 0
    image: str = ""
    good: int = 0
    vms: tuple[ClusterVmSnapshot, ...] = ()
