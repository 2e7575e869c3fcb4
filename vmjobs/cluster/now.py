"""Clusters and members as they are at one moment: what a plan is made of. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from vmjobs.cluster.member import Goal, MemberCode, Phase
from vmjobs.cluster.placement import Need
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.model import HypervisorKind
from vmjobs.ports import ProbeState


@dataclass(frozen=True)
class MemberNow:
    """A member: what was ordered, what its agent says, what its pool says.

    node: empty: it has none yet. generation: of the declaration that it was made by.
    withdrawn: the last incarnation that the pool was told is no more.
    admitted, condemned: the last incarnation that is. advertised: whose ad the collector had last;
    0: it has none. probe: what the probe job of the present machine did; None: nobody looked.
    waiting: since when it is waited for its ad or its probe job; None: the pool does not answer, and
    no machine is at fault for not being in it.
    code, why: why it has no node.
    """

    id: str
    name: str
    need: Need
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
    code: MemberCode = MemberCode.PROGRESS
    why: str = ""

    @property
    def number(self) -> int:
        """N of its name ``CLUSTER-N``."""
        return int(self.name.rpartition("-")[2])

    @property
    def ended(self) -> int:
        """The last incarnation whose machine is no more; 0: none is."""
        over = self.phase in {Phase.WAITING, Phase.GONE}
        return self.incarnation if over else max(0, self.incarnation - 1)

    @property
    def joined(self) -> bool:
        """Whether its present machine is in the pool."""
        return self.incarnation > 0 and self.advertised == self.incarnation

    @property
    def proven(self) -> bool:
        """Whether a probe job ran in its present machine."""
        return self.incarnation > 0 and self.admitted == self.incarnation

    @property
    def up(self) -> bool:
        """Whether its machine runs, and jobs may come; its node may be lost nevertheless."""
        return self.phase is Phase.RUNNING and self.joined and self.proven


@dataclass(frozen=True)
class ClusterNow:
    """A cluster and its members.

    kinds: what boots its image. deleting: how, if it is being deleted. stalled: the generation
    whose replacement of machines was found to fail. good: the last one that was fully up; 0: none.
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
    members: tuple[MemberNow, ...] = ()
