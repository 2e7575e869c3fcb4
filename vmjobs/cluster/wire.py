"""Wire models of clusters, between operators, the service, and agents."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, StringConstraints

from vmjobs.cluster.failure_backoff import BackoffState
from vmjobs.cluster.spec import AttributeValue, ClusterName, ClusterSpec, ClusterVmLimits, Lifecycle
from vmjobs.cluster.ssh_session import PendingSession
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Goal, Phase
from vmjobs.model import Digest, FrozenModel, HypervisorKind, LenientModel, NetworkMode

ClusterVmId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]

#: One less than the largest 32-bit integer of a database: a count may still be incremented.
MAX_COUNT: Final = 2**31 - 2

# --------------------------------------------------------------------------- service and agents


def _known_limits(value: Any) -> Any:
    """Drop unknown limits of an order: the service may be newer than the agent."""
    if not isinstance(value, dict):
        return value
    return {name: content for name, content in value.items() if name in ClusterVmLimits.model_fields}


class PoolAddress(LenientModel):
    """A pool as its cluster VMs see it.

    collector: ``host`` or ``host:port``. trust_domain: the issuer of its tokens. user: owner of probe
    jobs.
    """

    name: str
    collector: str
    trust_domain: str
    user: str = "vmjobs"


class ClusterVmOrder(LenientModel):
    """One cluster VM of a node's assignment. Only goal, admitted and condemned change.

    name: host name, unique in its pool (``CLUSTER-N``) and the same over restarts.
    admitted: the incarnation that has passed its probe and may run jobs; 0: none has.
    condemned: incarnations up to this one must end, because of ``why``; the next one is a new try.
    """

    id: ClusterVmId
    cluster: ClusterName
    name: str = Field(max_length=63)
    goal: Goal
    image: Digest
    cpus: int
    memory: int = Field(description="MiB")
    disk: int = Field(description="MiB")
    hypervisor: HypervisorKind | None = None
    network: NetworkMode = NetworkMode.OUTBOUND
    pool: PoolAddress
    attributes: dict[str, AttributeValue] = Field(default_factory=dict)
    start: str = "True"
    limits: Annotated[ClusterVmLimits, BeforeValidator(_known_limits)] = ClusterVmLimits()
    lifecycle: Lifecycle = Lifecycle.THROWAWAY
    boot_seconds: int
    drain_seconds: int
    admitted: int = 0
    condemned: int = 0
    why: ClusterVmCode = ClusterVmCode.PROGRESS
    why_message: str = ""


class Assignment(LenientModel):
    """All cluster VMs that a node must run. revision: grows with every change.

    sessions: those that wait for the node; each stays in the list until it is answered.
    """

    revision: int = Field(ge=0)
    members: tuple[ClusterVmOrder, ...] = Field(default=(), max_length=10000)
    sessions: tuple[PendingSession, ...] = Field(default=(), max_length=1000)


class ClusterVmReport(FrozenModel):
    """An agent's report of one cluster VM. incarnation: counts from 1; 0: none yet.

    failures: incarnations in a row that ended before they were admitted. retry: when WAITING ends.
    """

    id: ClusterVmId
    incarnation: int = Field(ge=0, le=MAX_COUNT)
    phase: Phase
    code: ClusterVmCode = ClusterVmCode.PROGRESS
    message: str = Field(default="", max_length=8192)
    since: datetime
    hypervisor: HypervisorKind | None = None
    failures: int = Field(default=0, ge=0, le=MAX_COUNT)
    retry: datetime | None = None
    seconds: dict[str, float] = Field(default_factory=dict, max_length=32)


class ClusterVmReports(FrozenModel):
    """The body of ``POST /v1/nodes/{node}/members``.

    complete: cluster VMs that are missing here are not on the node.
    """

    reports: tuple[ClusterVmReport, ...] = Field(max_length=10000)
    complete: bool = False


class TokenRequest(FrozenModel):
    """The body of ``POST /v1/nodes/{node}/members/{member}/token``."""

    incarnation: int = Field(ge=1, le=MAX_COUNT)


class PoolToken(LenientModel):
    """An IDTOKEN with which one VM may advertise its startd until it expires."""

    token: str
    identity: str
    expires: datetime


# --------------------------------------------------------------------------- service and operators


class ClusterVm(LenientModel):
    """A cluster VM as operators see it. since: when the state began. up_since: None unless UP.

    jobs: number that it has run, by its last machine ad. busy: it runs one now. system: name and
    version of its operating system, by its last machine ad; empty: no ad yet.
    """

    id: str
    name: str
    node: str = ""
    state: ClusterVmState
    goal: Goal
    image: Digest
    generation: int
    incarnation: int = 0
    failures: int = 0
    hypervisor: HypervisorKind | None = None
    busy: bool = False
    jobs: int = 0
    system: str = ""
    code: ClusterVmCode = ClusterVmCode.PROGRESS
    message: str = ""
    since: datetime
    up_since: datetime | None = None
    retry: datetime | None = None


class ClusterBackoff(LenientModel):
    """A backoff: an image is not started on a node for now, because it kept failing there.

    node: empty: on all nodes. failures: in a row. code: of the last one. until: time of the next try;
    HALF_OPEN since then.
    """

    image: Digest
    node: str = ""
    state: BackoffState
    failures: int
    code: ClusterVmCode
    message: str
    until: datetime | None = None


class FailedGeneration(LenientModel):
    """The last declaration, which failed, so that the cluster was rolled back."""

    generation: int
    spec: ClusterSpec
    image: Digest
    message: str
    since: datetime


class Cluster(LenientModel):
    """A cluster: its declaration and its present state.

    generation: grows with every change of the declaration. target: VMs wanted now.
    draining: the whole cluster is. deleting: it is deleted once its VMs have ended.
    guards: backoffs that keep its VMs off nodes. failed: the last declaration, if it was rolled back;
    ``spec``, ``image`` and ``generation`` are then those of the earlier one.
    """

    name: str
    owner: str
    spec: ClusterSpec
    image: Digest = Field(description="digest of the image's name for this generation")
    generation: int
    target: int
    draining: bool = False
    deleting: bool = False
    up: int = Field(description="members that are UP")
    members: tuple[ClusterVm, ...] = ()
    guards: tuple[ClusterBackoff, ...] = ()
    failed: FailedGeneration | None = None
    created: datetime
    updated: datetime


class ApplyOutcome(StrEnum):
    """The effect of applying a declaration."""

    CREATED = "created"
    CHANGED = "changed"
    UNCHANGED = "unchanged"


class ApplyResult(LenientModel):
    """The answer to ``PUT /v1/clusters/{name}``."""

    outcome: ApplyOutcome
    cluster: Cluster


class ClusterList(LenientModel):
    """A page of clusters, by name, without their VMs. next: cursor of the next page, if any."""

    clusters: tuple[Cluster, ...]
    next: str = ""


class ClusterEvent(LenientModel):
    """An event of a cluster or one of its VMs. seq: counts from 1 in the cluster."""

    seq: int
    time: datetime
    member: str = Field(default="", description="its name; empty: the cluster itself")
    node: str = ""
    state: str
    code: str
    message: str


class ClusterEvents(LenientModel):
    """A part of a cluster's history, oldest first."""

    events: tuple[ClusterEvent, ...]


class ScaleRequest(FrozenModel):
    """The body of ``POST /v1/clusters/{name}/scale``: a new size of the same cluster."""

    size: int = Field(ge=0, le=1000, strict=True)


class Assessment(LenientModel):
    """The answer to ``POST /v1/cluster-assessments``: how much of a declaration would run now.

    placed: number of VMs, by node. pending: number without a node. why: what they lack.
    """

    placed: dict[str, int]
    pending: int
    why: str = ""
