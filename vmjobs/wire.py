"""The envelopes of the REST interface: what wraps the objects of :mod:`vmjobs.model` in replies.

Shared by the service and the client library. Unknown fields are ignored, so that a client can
talk to a service that is newer than itself.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from vmjobs.model import (
    AttemptId,
    Checkpoint,
    Digest,
    Frozen,
    ImageName,
    Job,
    JobEvent,
    Namespace,
    Node,
    NodeName,
    Output,
    RejectedEntry,
    Tag,
)

#: Digests that fit into one question about segments or blocks.
MAX_DIGESTS: Final = 4096
#: With so many users and groups an image may be shared.
MAX_SHARES: Final = 100


class Envelope(BaseModel):
    """Base of replies: immutable, and open for what later versions add."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class ProblemFault(Envelope):
    """One thing wrong with a request."""

    field: str = Field(description="dotted path of the offending field, empty for the whole")
    code: str
    message: str


class Problem(Envelope):
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


class Submitted(Envelope):
    """What became of a submission."""

    array: str
    jobs: tuple[Job, ...]


class JobPage(Envelope):
    """Some jobs, newest first, and the cursor of the next page (empty on the last one)."""

    jobs: tuple[Job, ...]
    next: str = ""


class EventList(Envelope):
    """A part of a job's history, oldest first."""

    events: tuple[JobEvent, ...]


class OutputList(Envelope):
    """What a job delivered, and what was refused."""

    outputs: tuple[Output, ...]
    rejected: tuple[RejectedEntry, ...]


class Visibility(StrEnum):
    """Who may see and boot an image besides its owner and those it is shared with."""

    PRIVATE = "private"
    PUBLIC = "public"


class Share(Frozen):
    """Somebody whom an image is shared with: a user, or a group of the token's ``wlcg.groups``."""

    kind: Literal["user", "group"]
    name: str = Field(min_length=1, max_length=255)


class Origin(Frozen):
    """Where an image came from; said by whoever brought it, and kept as it was said.

    file: what it was pushed from. format: the format that file had. builder: the program.
    """

    file: str = Field(default="", max_length=255)
    format: str = Field(default="", max_length=32)
    builder: str = Field(default="", max_length=255)
    source: str = Field(default="", max_length=1024, description="a reference, e.g. of a container")


class ImageTag(Envelope):
    """A name that an image has."""

    namespace: Namespace
    name: ImageName
    tag: Tag


class ImageInfo(Envelope):
    """An image that the caller may name, as lists show it. One entry for each of its tags."""

    namespace: str
    name: str
    tag: str
    digest: Digest
    size: int = Field(ge=0, description="bytes, of all its parts")
    architecture: str
    owner: str = ""
    visibility: Visibility = Visibility.PRIVATE
    created: datetime | None = None
    deprecated: str = Field(default="", description="why it should not be used any more; empty: it may")


class ImageList(Envelope):
    """Some of the images that the caller may name, by name. next: cursor of the next page, if any."""

    images: tuple[ImageInfo, ...]
    next: str = ""


class ImageDetail(Envelope):
    """One image with its manifest.

    stored: bytes that it occupies, blocks shared with other images counted here too.
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


class UploadRequest(Frozen):
    """The body of ``POST /v1/uploads``. size: bytes of content that will be added at most."""

    size: int = Field(ge=1)


#: The id of a job that HTCondor alone knows begins so, and none of the service's own does.
CONDOR_JOB: Final = "htc"
CondorJobId = Annotated[str, StringConstraints(pattern=rf"^{CONDOR_JOB}[0-9a-f]{{29}}$")]


class CondorJobClaim(Frozen):
    """The body of ``POST /v1/condor-jobs/ID/attempts``. owner: of the job, as HTCondor knows him."""

    attempt: AttemptId
    owner: str = Field(min_length=1, max_length=240, pattern=r"^[^\x00-\x1f]+$")


class CondorJobTicket(Envelope):
    """What a node gets for it. token: good for this job only. checkpoint: what to go on from."""

    token: str
    checkpoint: Checkpoint | None = None


class Upload(Envelope):
    """Room to put segments and contents into, until an image holds on to them.

    received: bytes that were stored on its behalf. expires: when it is given up unless used.
    """

    id: str
    size: int
    received: int
    expires: datetime


class Publication(Frozen):
    """The body of ``POST /v1/images``: make an image of contents that are here.

    manifest: of the image, as JSON. name, tag: what to call it (empty: nothing).
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


class ImageChange(Frozen):
    """The body of ``PATCH /v1/images/{digest}``; what is unset stays. deprecated "": not any more."""

    visibility: Visibility | None = None
    shares: tuple[Share, ...] | None = Field(default=None, max_length=MAX_SHARES)
    deprecated: str | None = Field(default=None, max_length=1024)
    keep_days: int | None = Field(default=None, ge=0, le=36500)
    signature: str | None = Field(default=None, max_length=4096)


class TagTarget(Frozen):
    """The body of ``PUT /v1/tags/…``: what the tag is to mean."""

    digest: Digest


class DamagedBlock(Envelope):
    """A block that is not what its digest says. number: within its segment. offset: in its content."""

    segment: str
    number: int
    why: str


class VerifyReport(Envelope):
    """What a look at some segments found; ``missing`` ones are not in the store at all."""

    checked: int
    damaged: tuple[DamagedBlock, ...] = ()
    missing: tuple[str, ...] = ()


class GcReport(Envelope):
    """What a garbage collection removed, or would remove."""

    images: int = Field(default=0, description="whose time was over")
    contents: int = 0
    segments: int = 0
    bytes: int = 0
    uploads: int = Field(default=0, description="given up")
    blobs: int = Field(default=0, description="files that were uploaded, and that no job used")


class PrefetchRequest(Frozen):
    """The body of ``POST /v1/images/{digest}/prefetch``: which nodes; none named: all of ``site``."""

    site: str = Field(default="", max_length=255)
    nodes: tuple[NodeName, ...] = Field(default=(), max_length=1000)


class PrefetchState(Envelope):
    """Nodes that were asked to have an image, and those that have it."""

    wanted: tuple[str, ...]
    cached: tuple[str, ...]


class NodeWishes(Envelope):
    """The answer to a node's announcement: images that it is to fetch when it has time.

    token: a new one, where the node has asked and its own is in the second half of its life.
    """

    prefetch: tuple[Digest, ...] = ()
    token: str = ""


class BuildState(StrEnum):
    """How far the build of an image by the service is."""

    QUEUED = "QUEUED"
    BUILDING = "BUILDING"
    TESTING = "TESTING"
    PUBLISHING = "PUBLISHING"
    DONE = "DONE"
    FAILED = "FAILED"

    @property
    def final(self) -> bool:
        """True when nothing more will happen."""
        return self in {BuildState.DONE, BuildState.FAILED}


class BuildRequest(Frozen):
    """The body of ``POST /v1/builds``: have the service build an image, boot it, and publish it.

    recipe: a recipe with all its layers composed, see ``docs/recipes.md``. name, tag: what to call
    the image; empty: the recipe's name; its version, and ``latest``. namespace: empty: the
    caller's own. force: build anew even if nothing changed.
    """

    recipe: dict[str, Any]
    namespace: Namespace | Literal[""] = ""
    name: ImageName | Literal[""] = ""
    tag: Tag | Literal[""] = ""
    visibility: Visibility = Visibility.PRIVATE
    force: bool = False


class Build(Envelope):
    """A build. name: what the image is to be called. digest: the image's, once it is published.

    code, message, hint: why it failed; the end of the boot test's output is in the message.
    """

    id: str
    owner: str
    name: str
    state: BuildState
    step: str = Field(default="", description="what is being done, for people")
    progress: float = Field(default=0, ge=0, le=1)
    code: str = Field(default="", description="stable, meant for programs")
    message: str = ""
    hint: str = ""
    digest: str = ""
    created: datetime
    updated: datetime


class BuildList(Envelope):
    """Builds, newest first."""

    builds: tuple[Build, ...]


class NodeList(Envelope):
    """Some of the execute nodes that announced themselves, by name. next: cursor of the next page."""

    nodes: tuple[Node, ...]
    next: str = ""


class Limits(Envelope):
    """What a job may ask for at most."""

    cpus: int
    memory: int = Field(description="MiB")
    disk: int = Field(description="MiB")
    run_seconds: int
    script_bytes: int
    array: int = Field(description="jobs in one submission")
    stream_bytes: int = Field(description="kept of an output stream or console")


class ServiceInfo(Envelope):
    """What this service is and what it takes."""

    version: str
    api_version: str
    strategies: tuple[str, ...]
    hypervisors: tuple[str, ...]
    networks: tuple[str, ...]
    routes: tuple[str, ...]
    default_route: str
    limits: Limits
    retention: str


class Health(Envelope):
    """Whether the service works, and each of those it leans on."""

    status: str = Field(description="ok or unavailable")
    services: dict[str, str] = Field(description="ok, or why not, by name")
