"""The actions of a plan for clusters. ``vm`` is the id of a cluster VM."""

from __future__ import annotations

from dataclasses import dataclass

from vmjobs.cluster.placement import Placement
from vmjobs.cluster.vm_state import ClusterVmCode, Goal


@dataclass(frozen=True)
class CreateVm:
    """Create a cluster VM of the present generation, on a node or without one."""

    cluster: str
    name: str
    place: Placement


@dataclass(frozen=True)
class AssignNode:
    """Assign a cluster VM to a node."""

    vm: str
    node: str


@dataclass(frozen=True)
class SetPending:
    """Record why a cluster VM has no node."""

    vm: str
    code: ClusterVmCode
    why: str


@dataclass(frozen=True)
class SetGoal:
    """End a cluster VM: after its last job, or now."""

    vm: str
    goal: Goal


@dataclass(frozen=True)
class AllowJobs:
    """Allow jobs on this incarnation."""

    vm: str
    incarnation: int


@dataclass(frozen=True)
class ReplaceVm:
    """End this incarnation and start another one."""

    vm: str
    incarnation: int
    code: ClusterVmCode
    why: str


@dataclass(frozen=True)
class RemoveAd:
    """Remove the ad of an ended VM from the pool, which would send jobs to it."""

    vm: str


@dataclass(frozen=True)
class DeleteVm:
    """Delete a cluster VM that is over, after its ad is removed from the pool."""

    vm: str


@dataclass(frozen=True)
class PauseRollout:
    """Pause the replacement of VMs by the new generation."""

    cluster: str
    why: str


@dataclass(frozen=True)
class CompleteRollout:
    """Mark the present generation as good: all VMs are of it and up."""

    cluster: str


@dataclass(frozen=True)
class RollBack:
    """Return to the last good generation."""

    cluster: str
    why: str


@dataclass(frozen=True)
class DeleteCluster:
    """Delete a cluster whose deletion was requested and that has no VMs left."""

    cluster: str


Action = (
    CreateVm
    | AssignNode
    | SetPending
    | SetGoal
    | AllowJobs
    | ReplaceVm
    | RemoveAd
    | DeleteVm
    | PauseRollout
    | CompleteRollout
    | RollBack
    | DeleteCluster
)
