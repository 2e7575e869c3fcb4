"""The envelopes of the REST interface: what wraps the objects of :mod:`vmjobs.model` in replies.

Shared by the service and the client library. Unknown fields are ignored, so that a client can
talk to a service that is newer than itself.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vmjobs.model import Digest, Job, JobEvent, Node, Output, RejectedEntry


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


class ImageInfo(Envelope):
    """An image that jobs can name."""

    name: str
    tag: str
    digest: Digest
    size: int = Field(ge=0, description="bytes, of all its blobs")
    architecture: str


class ImageList(Envelope):
    """All images."""

    images: tuple[ImageInfo, ...]


class ImageDetail(Envelope):
    """One image with its manifest."""

    name: str
    tag: str = ""
    digest: Digest
    size: int = Field(ge=0)
    manifest: dict[str, Any]


class NodeList(Envelope):
    """All execute nodes that announced themselves."""

    nodes: tuple[Node, ...]


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
