"""What travels about clusters: between operators, the service, and agents."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, StringConstraints

from vmjobs.cluster.guard import GuardState
from vmjobs.cluster.member import Goal, MemberCode, MemberState, Phase
from vmjobs.cluster.session import SessionCall
from vmjobs.cluster.spec import AttributeValue, ClusterName, ClusterSpec, Lifecycle, Limits
from vmjobs.model import Digest, Frozen, HypervisorKind, NetworkMode
from vmjobs.wire import Envelope

MemberId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]

#: What a database's integer holds, and one more.
MAX_COUNT: Final = 2**31 - 2

# --------------------------------------------------------------------------- service and agents


def _known_limits(value: Any) -> Any:
    """What an operator declares is taken to the letter; what a newer service orders is not."""
    if not isinstance(value, dict):
        return value
    return {name: content for name, content in value.items() if name in Limits.model_fields}


class PoolAddress(Envelope):
    """A pool as its members see it.

    collector: ``host`` or ``host:port``. trust_domain: the issuer of its tokens. user: whose jobs
    probes are.
    """

    name: str
    collector: str
    trust_domain: str
    user: str = "vmjobs"


class MemberOrder(Envelope):
    """One machine that a node is to have. All but goal, admitted and condemned never changes.

    name: host name of the machine, unique in its pool (``CLUSTER-N``); it keeps it over restarts.
    admitted: the incarnation that has passed its probe and may take jobs; 0: none has.
    condemned: incarnations up to this one are to end, for ``why``; the next one is a new try.
    """

    id: MemberId
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
    limits: Annotated[Limits, BeforeValidator(_known_limits)] = Limits()
    lifecycle: Lifecycle = Lifecycle.THROWAWAY
    boot_seconds: int
    drain_seconds: int
    admitted: int = 0
    condemned: int = 0
    why: MemberCode = MemberCode.PROGRESS
    why_message: str = ""


class NodeShare(Envelope):
    """All machines that a node is to have. revision: grows with every change of it.

    sessions: that wait for the node; each is there until it is answered.
    """

    revision: int = Field(ge=0)
    members: tuple[MemberOrder, ...] = Field(default=(), max_length=10000)
    sessions: tuple[SessionCall, ...] = Field(default=(), max_length=1000)


class MemberReport(Frozen):
    """What an agent says of one member. incarnation: counts its machines, from 1; 0: none yet.

    failures: machines in a row that ended before they were admitted. retry: when WAITING ends.
    """

    id: MemberId
    incarnation: int = Field(ge=0, le=MAX_COUNT)
    phase: Phase
    code: MemberCode = MemberCode.PROGRESS
    message: str = Field(default="", max_length=8192)
    since: datetime
    hypervisor: HypervisorKind | None = None
    failures: int = Field(default=0, ge=0, le=MAX_COUNT)
    retry: datetime | None = None
    seconds: dict[str, float] = Field(default_factory=dict, max_length=32)


class MemberReports(Frozen):
    """The body of ``POST /v1/nodes/{node}/members``.

    complete: members that are not in it are not on the node.
    """

    reports: tuple[MemberReport, ...] = Field(max_length=10000)
    complete: bool = False


class TokenRequest(Frozen):
    """The body of ``POST /v1/nodes/{node}/members/{member}/token``."""

    incarnation: int = Field(ge=1, le=MAX_COUNT)


class PoolToken(Envelope):
    """An IDTOKEN for one machine, good for advertising its startd until it expires."""

    token: str
    identity: str
    expires: datetime


# --------------------------------------------------------------------------- service and operators


class Member(Envelope):
    """A member as operators see it. since: when the state began. up_since: None unless UP.

    jobs: that it has run, as its machine ad told last. busy: it runs one now. system: name and version
    of its operating system, as its machine ad told last; empty: it has had none yet.
    """

    id: str
    name: str
    node: str = ""
    state: MemberState
    goal: Goal
    image: Digest
    generation: int
    incarnation: int = 0
    failures: int = 0
    hypervisor: HypervisorKind | None = None
    busy: bool = False
    jobs: int = 0
    system: str = ""
    code: MemberCode = MemberCode.PROGRESS
    message: str = ""
    since: datetime
    up_since: datetime | None = None
    retry: datetime | None = None


class ClusterGuard(Envelope):
    """Where an image is not tried for now, because it only failed there.

    node: empty: on all nodes. failures: in a row. code: of the last one. until: when it is tried
    again; HALF_OPEN since then.
    """

    image: Digest
    node: str = ""
    state: GuardState
    failures: int
    code: MemberCode
    message: str
    until: datetime | None = None


class FailedGeneration(Envelope):
    """What was declared last, and failed: the cluster went back to what it was before."""

    generation: int
    spec: ClusterSpec
    image: Digest
    message: str
    since: datetime


class Cluster(Envelope):
    """A cluster as it is: what was declared, what is there.

    generation: grows with every change of the declaration. target: machines wanted now.
    draining: the whole cluster is. deleting: it goes once its machines have gone.
    guards: that keep machines of it from nodes. failed: what was declared last, if the cluster went
    back from it; ``spec``, ``image`` and ``generation`` are those that it went back to.
    """

    name: str
    owner: str
    spec: ClusterSpec
    image: Digest = Field(description="what the image's name means for this generation")
    generation: int
    target: int
    draining: bool = False
    deleting: bool = False
    up: int = Field(description="members that are UP")
    members: tuple[Member, ...] = ()
    guards: tuple[ClusterGuard, ...] = ()
    failed: FailedGeneration | None = None
    created: datetime
    updated: datetime


class Outcome(StrEnum):
    """What applying a declaration did."""

    CREATED = "created"
    CHANGED = "changed"
    UNCHANGED = "unchanged"


class Applied(Envelope):
    """The answer to ``PUT /v1/clusters/{name}``."""

    outcome: Outcome
    cluster: Cluster


class ClusterList(Envelope):
    """Some clusters, by name, without their members. next: cursor of the next page, if any."""

    clusters: tuple[Cluster, ...]
    next: str = ""


class ClusterEvent(Envelope):
    """Something that happened to a cluster or a member of it. seq: counts from 1 in the cluster."""

    seq: int
    time: datetime
    member: str = Field(default="", description="its name; empty: the cluster itself")
    node: str = ""
    state: str
    code: str
    message: str


class ClusterEvents(Envelope):
    """A part of a cluster's history, oldest first."""

    events: tuple[ClusterEvent, ...]


class Scale(Frozen):
    """The body of ``POST /v1/clusters/{name}/scale``: a new size of the same cluster."""

    size: int = Field(ge=0, le=1000, strict=True)


class Assessment(Envelope):
    """How much of a declaration would run now: the answer to ``POST /v1/cluster-assessments``.

    placed: machines, by node. pending: those that no node has room for. why: what they lack.
    """

    placed: dict[str, int]
    pending: int
    why: str = ""
