"""The actions of a plan for clusters. ``member`` is the id of a cluster VM."""

from __future__ import annotations

from dataclasses import dataclass

from vmjobs.cluster.member import Goal, MemberCode
from vmjobs.cluster.placement import Placement


@dataclass(frozen=True)
class Create:
    """Create a cluster VM of the present generation, on a node or without one."""

    cluster: str
    name: str
    place: Placement


@dataclass(frozen=True)
class Place:
    """Assign a cluster VM to a node."""

    member: str
    node: str


@dataclass(frozen=True)
class SetPending:
    """Record why a cluster VM has no node."""

    member: str
    code: MemberCode
    why: str


@dataclass(frozen=True)
class SetGoal:
    """End a cluster VM: after its last job, or now."""

    member: str
    goal: Goal


@dataclass(frozen=True)
class Admit:
    """Allow jobs on this incarnation."""

    member: str
    incarnation: int


@dataclass(frozen=True)
class Condemn:
    """End this incarnation and start another one."""

    member: str
    incarnation: int
    code: MemberCode
    why: str


@dataclass(frozen=True)
class Withdraw:
    """Remove the ad of an ended VM from the pool, which would send jobs to it."""

    member: str


@dataclass(frozen=True)
class Forget:
    """Delete a cluster VM that is over, after its ad is removed from the pool."""

    member: str


@dataclass(frozen=True)
class Stall:
    """Pause the replacement of VMs by the new generation."""

    cluster: str
    why: str


@dataclass(frozen=True)
class Keep:
    """Mark the present generation as good: all VMs are of it and up."""

    cluster: str


@dataclass(frozen=True)
class RollBack:
    """Return to the last good generation."""

    cluster: str
    why: str


@dataclass(frozen=True)
class Remove:
    """Delete a cluster whose deletion was requested and that has no VMs left."""

    cluster: str


Action = (
    Create
    | Place
    | SetPending
    | SetGoal
    | Admit
    | Condemn
    | Withdraw
    | Forget
    | Stall
    | Keep
    | RollBack
    | Remove
)
