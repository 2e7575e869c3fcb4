"""Request and reply bodies of the REST interface, built on :mod:`vmjobs.model`.

Shared by the service and the client library. Replies ignore unknown fields, so that a client can use a
newer service.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints

from vmjobs.model import (
    AttemptId,
    Checkpoint,
    Digest,
    FrozenModel,
    ImageName,
    Job,
    JobEvent,
    LenientModel,
    Namespace,
    Node,
    NodeName,
    Output,
    RejectedEntry,
    Tag,
)

#: Maximum number of digests in one query for missing segments or chunks.
MAX_DIGESTS: Final = 4096
#: Maximum number of users and groups that an image is shared with.
MAX_SHARES: Final = 100


class ProblemFault(LenientModel):
    """One fault of a request."""

    field: str = Field(description="dotted path of the field; empty: the whole request")
    code: str
    message: str


class Problem(LenientModel):
    """A problem document (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int = Field(ge=400, le=599)
    detail: str = ""
    code: str = Field(default="", description="stable, meant for programs")
    hint: str = Field(default="", description="what the reader can do about it")
    errors: tuple[ProblemFault, ...] = ()
    service: str = Field(default="", description="which service does not answer (503)")
    instance: str = Field(default="", description="names the incident (500)")


class Submitted(LenientModel):
    """The jobs of a submission."""

    array: str
    jobs: tuple[Job, ...]


class JobPage(LenientModel):
    """A page of jobs, newest first. next: cursor of the next page; empty: there is none."""

    jobs: tuple[Job, ...]
    next: str = ""


class EventList(LenientModel):
    """Events of a job, oldest first."""

    events: tuple[JobEvent, ...]


class OutputList(LenientModel):
    """The outputs of a job, and those that were refused."""

    outputs: tuple[Output, ...]
    rejected: tuple[RejectedEntry, ...]


class Visibility(StrEnum):
    """Who else, besides the owner and the shares, may see and boot an image."""

    PRIVATE = "private"
    PUBLIC = "public"


class Share(FrozenModel):
    """A user, or a group of the token's ``wlcg.groups``, that an image is shared with."""

    kind: Literal["user", "group"]
    name: str = Field(min_length=1, max_length=255)


class Origin(FrozenModel):
    """The origin of an image, as its uploader states it; not verified.

    file: the pushed file. format: that file's format. builder: the program that built it.
    """

    file: str = Field(default="", max_length=255)
    format: str = Field(default="", max_length=32)
    builder: str = Field(default="", max_length=255)
    source: str = Field(default="", max_length=1024, description="a reference, e.g. of a container")


class ImageTag(LenientModel):
    """A tag of an image."""

    namespace: Namespace
    name: ImageName
    tag: Tag


class ImageInfo(LenientModel):
    """An entry of an image list: one for each tag that the caller may see."""

    namespace: str
    name: str
    tag: str
    digest: Digest
    size: int = Field(ge=0, description="bytes, of all its parts")
    architecture: str
    owner: str = ""
    visibility: Visibility = Visibility.PRIVATE
    created: datetime | None = None
    deprecated: str = Field(default="", description="why it should no longer be used; empty: it may be")


class ImageList(LenientModel):
    """A page of images, by name. next: cursor of the next page; empty: there is none."""

    images: tuple[ImageInfo, ...]
    next: str = ""


class ImageDetail(LenientModel):
    """One image with its manifest.

    stored: bytes that it occupies, including chunks that it shares with other images.
    signers: names of the trusted keys that signed it.
    """

    digest: Digest
    owner: str
    visibility: Visibility
    shares: tuple[Share, ...] = ()
    tags: tuple[ImageTag, ...] = ()
    created: datetime
    expires: datetime | None = None
    deprecated: str = ""
    origin: Origin = Origin()
    signers: tuple[str, ...] = ()
    size: int = Field(ge=0)
    stored: int = Field(ge=0)
    manifest: dict[str, Any]


class UploadRequest(FrozenModel):
    """The body of ``POST /v1/uploads``. size: maximum bytes of content."""

    size: int = Field(ge=1)


#: Prefix of the ids of transparent jobs; no id of the service's own jobs begins with it.
CONDOR_JOB: Final = "htc"
CondorJobId = Annotated[str, StringConstraints(pattern=rf"^{CONDOR_JOB}[0-9a-f]{{29}}$")]


class CondorJobClaim(FrozenModel):
    """The body of ``POST /v1/condor-jobs/ID/attempts``. owner: of the job, in HTCondor."""

    attempt: AttemptId
    owner: str = Field(min_length=1, max_length=240, pattern=r"^[^\x00-\x1f]+$")


class CondorJobTicket(LenientModel):
    """The reply to a claim. token: valid for this job only. checkpoint: to resume from."""

    token: str
    checkpoint: Checkpoint | None = None


class Upload(LenientModel):
    """An upload: holds segments and contents until an image refers to them.

    received: bytes stored for it. expires: when it is removed unless used.
    """

    id: str
    size: int
    received: int
    expires: datetime


class Publication(FrozenModel):
    """The body of ``POST /v1/images``: make an image of uploaded contents.

    manifest: of the image, as JSON. name, tag: its first tag (empty name: none).
    namespace: empty: the caller's own. keep_days: 0: until it is removed.
    signature: see ``docs/images.md``; empty: none.
    """

    manifest: dict[str, Any]
    upload: str = Field(default="", max_length=64)
    namespace: Namespace | Literal[""] = ""
    name: ImageName | Literal[""] = ""
    tag: Tag = "latest"
    visibility: Visibility = Visibility.PRIVATE
    shares: tuple[Share, ...] = Field(default=(), max_length=MAX_SHARES)
    keep_days: int = Field(default=0, ge=0, le=36500)
    origin: Origin = Origin()
    signature: str = Field(default="", max_length=4096)


class ImageChange(FrozenModel):
    """The body of ``PATCH /v1/images/{digest}``; unset fields stay. deprecated: "" clears."""

    visibility: Visibility | None = None
    shares: tuple[Share, ...] | None = Field(default=None, max_length=MAX_SHARES)
    deprecated: str | None = Field(default=None, max_length=1024)
    keep_days: int | None = Field(default=None, ge=0, le=36500)
    signature: str | None = Field(default=None, max_length=4096)


class TagTarget(FrozenModel):
    """The body of ``PUT /v1/tags/…``: the image that the tag points to."""

    digest: Digest


class DamagedBlock(LenientModel):
    """A chunk that does not match its digest. number: of the chunk within its segment."""

    segment: str
    number: int
    why: str


class VerifyReport(LenientModel):
    """The result of verifying segments; ``missing`` ones are not in the store at all."""

    checked: int
    damaged: tuple[DamagedBlock, ...] = ()
    missing: tuple[str, ...] = ()


class GcReport(LenientModel):
    """Numbers of objects that a garbage collection removed, or would remove."""

    images: int = Field(default=0, description="expired")
    contents: int = 0
    segments: int = 0
    bytes: int = 0
    uploads: int = Field(default=0, description="expired")
    blobs: int = Field(default=0, description="uploaded files that no job used")


class PrefetchRequest(FrozenModel):
    """The body of ``POST /v1/images/{digest}/prefetch``. nodes: empty: all of ``site``."""

    site: str = Field(default="", max_length=255)
    nodes: tuple[NodeName, ...] = Field(default=(), max_length=1000)


class PrefetchState(LenientModel):
    """The nodes that should cache an image, and those that do."""

    wanted: tuple[str, ...]
    cached: tuple[str, ...]


class NodeWishes(LenientModel):
    """The answer to a node's registration. prefetch: images to fetch when it is idle.

    token: a new one, if the node requested it and its own is in the second half of its lifetime.
    """

    prefetch: tuple[Digest, ...] = ()
    token: str = ""


class BuildState(StrEnum):
    """The state of an image build by the service."""

    QUEUED = "QUEUED"
    BUILDING = "BUILDING"
    TESTING = "TESTING"
    PUBLISHING = "PUBLISHING"
    DONE = "DONE"
    FAILED = "FAILED"

    @property
    def final(self) -> bool:
        """True if the build has ended."""
        return self in {BuildState.DONE, BuildState.FAILED}


class BuildRequest(FrozenModel):
    """The body of ``POST /v1/builds``: build an image, boot it, and publish it.

    recipe: a recipe with all its layers composed, see ``docs/recipes.md``. name: of the image; empty:
    the recipe's name. tag: empty: the recipe's version, and ``latest``. namespace: empty: the caller's
    own. force: build even if nothing changed.
    """

    recipe: dict[str, Any]
    namespace: Namespace | Literal[""] = ""
    name: ImageName | Literal[""] = ""
    tag: Tag | Literal[""] = ""
    visibility: Visibility = Visibility.PRIVATE
    force: bool = False


class Build(LenientModel):
    """A build. name: of the image. digest: of the image, once it is published.

    code, message, hint: why it failed; the message has the end of the boot test's output.
    """

    id: str
    owner: str
    name: str
    state: BuildState
    step: str = Field(default="", description="the present step, for display")
    progress: float = Field(default=0, ge=0, le=1)
    code: str = Field(default="", description="stable, meant for programs")
    message: str = ""
    hint: str = ""
    digest: str = ""
    created: datetime
    updated: datetime


class BuildList(LenientModel):
    """Builds, newest first."""

    builds: tuple[Build, ...]


class NodeList(LenientModel):
    """A page of registered nodes, by name. next: cursor of the next page; empty: none."""

    nodes: tuple[Node, ...]
    next: str = ""


class Limits(LenientModel):
    """The maximum that a job may request."""

    cpus: int
    memory: int = Field(description="MiB")
    disk: int = Field(description="MiB")
    run_seconds: int
    script_bytes: int
    array: int = Field(description="jobs in one submission")
    stream_bytes: int = Field(description="stored of an output stream or console")


class ServiceInfo(LenientModel):
    """Versions, limits and choices of the service."""

    version: str
    api_version: str
    strategies: tuple[str, ...]
    hypervisors: tuple[str, ...]
    networks: tuple[str, ...]
    routes: tuple[str, ...]
    default_route: str
    limits: Limits
    retention: str


class Health(LenientModel):
    """Whether the service and each of the services that it needs work."""

    status: str = Field(description="ok or unavailable")
    services: dict[str, str] = Field(description="ok, or why not, by name")
