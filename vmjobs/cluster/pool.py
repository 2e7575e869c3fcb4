"""Cluster VMs and idle jobs as an HTCondor pool reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

#: A value that a ClassAd attribute can have.
ClassAdValue = str | int | float | bool


@dataclass(frozen=True)
class PoolVm:
    """A cluster VM, as its pool's collector advertises it.

    name: may be reused. incarnation: counts the VMs started for this id. id: unique, never reused;
    empty: the ad has none. busy: jobs run in it. jobs: number of jobs that it has run. system: name and
    version of its operating system.
    """

    name: str
    incarnation: int
    id: str = ""
    busy: bool = False
    jobs: int = 0
    system: str = ""


@dataclass(frozen=True)
class WorkerVmProfile:
    """The properties of a cluster's VMs, present or future.

    memory, disk: MiB. attributes, start: as declared. known: attributes of earlier ads of such VMs.
    learn: name of a VM whose present ad shows them; empty: none. up: number of VMs that are up.
    """

    cluster: str
    cpus: int
    memory: int
    disk: int
    attributes: Mapping[str, ClassAdValue]
    start: str
    known: Mapping[str, ClassAdValue]
    learn: str = ""
    up: int = 0


@dataclass(frozen=True)
class IdleJobs:
    """The idle jobs that need one cluster.

    jobs: number of idle jobs that no other slot of the pool and no earlier cluster could run.
    vms: number of VMs that they would fill. known: new value for :class:`WorkerVmProfile`; empty:
    unchanged.
    """

    jobs: int = 0
    vms: int = 0
    known: Mapping[str, ClassAdValue] = field(default_factory=dict)


class ProbeState(StrEnum):
    WAITING = "waiting"
    RAN = "ran"
    FAILED = "failed"
