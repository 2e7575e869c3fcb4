"""The job repository: what the API and the worker do with jobs, blobs, streams and nodes.

Every method may also raise ``Unavailable("database", …)``; foreign exceptions never come out.
``owner=None`` means: whoever owns it (agents and the worker); with an owner, another owner's job
is ``NotFound``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import BinaryIO, NamedTuple

from repository.blobs import BlobReader, BlobStore
from repository.database import Database
from repository.streams import StreamReader, StreamStore
from repository.validation import ImageResolver
from vmjobs.config import Config
from vmjobs.errors import Unavailable
from vmjobs.model import (
    AttemptClaim,
    CondorRef,
    Job,
    JobEvent,
    JobState,
    JobTicket,
    Node,
    Output,
    RejectedEntry,
    Report,
    StreamName,
    Submission,
)
from vmjobs.ports import Observation

#: Called inside the transaction, before its commit, with an array or job id.
Publish = Callable[[str], None]


class Submitted(NamedTuple):
    """What became of a submission. ``created`` is false where the key was seen before."""

    array: str
    jobs: list[Job]
    created: bool


class JobPage(NamedTuple):
    """Some jobs, newest first, and the cursor of the next page (``""``: there is none)."""

    jobs: list[Job]
    next: str


class OutputList(NamedTuple):
    """What the latest attempt delivered, and what was not taken."""

    outputs: list[Output]
    rejected: list[RejectedEntry]


class Repository:
    """Jobs, their files, and the nodes that run them. Safe to share between threads."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        streams: StreamStore,
        images: ImageResolver,
        config: Config,
    ) -> None:
        """Take the collaborators; nothing is opened here. See :func:`open_repository`."""

    # -- users

    def submit(
        self, owner: str, submission: Submission, key: str = "", publish: Publish | None = None
    ) -> Submitted:
        """Store ``count`` jobs and publish the array's id before the commit.

        Raises:
            InvalidSpec: with every fault (limits, image, inputs, what no live node offers).
            IdempotencyConflict: ``key`` was used with another body.
            Unavailable: what ``publish`` raises (``broker``); then nothing is stored.
        """
        raise Unavailable("database", "not built yet")

    def job(self, job_id: str, owner: str | None = None) -> Job:
        """One job.  Raises NotFound."""
        raise Unavailable("database", "not built yet")

    def version(self, job_id: str, owner: str | None = None) -> int:
        """A number that grows with every change of the job: cheap to read, good as an ETag.

        Raises NotFound.
        """
        raise Unavailable("database", "not built yet")

    def jobs(
        self,
        owner: str | None,
        states: Collection[JobState] = (),
        array: str = "",
        limit: int = 256,
        cursor: str = "",
    ) -> JobPage:
        """Jobs, newest first.  Raises InvalidRequest for a cursor that is none of ours."""
        raise Unavailable("database", "not built yet")

    def events(self, job_id: str, after: int = 0, owner: str | None = None) -> list[JobEvent]:
        """The job's history past ``seq`` ``after``.  Raises NotFound."""
        raise Unavailable("database", "not built yet")

    def outputs(self, job_id: str, owner: str | None = None) -> OutputList:
        """What the job delivered.  Raises NotFound."""
        raise Unavailable("database", "not built yet")

    def cancel(self, job_id: str, owner: str | None = None, publish: Publish | None = None) -> Job:
        """Ask the job to stop: it is CANCELING, or CANCELED where nothing was started yet.

        ``publish`` is called with the job's id after the commit; if it fails the worker's sweep
        finds the job.  Repeating the call is no error.
        Raises NotFound; JobFinal (a Conflict) for a job that has ended.
        """
        raise Unavailable("database", "not built yet")

    def open_stream(self, job_id: str, name: StreamName, owner: str | None = None) -> StreamReader:
        """The latest attempt's stream, as long as it is now; empty if there is none.

        Raises NotFound (no such job).
        """
        raise Unavailable("database", "not built yet")

    def open_output(self, job_id: str, path: str, owner: str | None = None) -> BlobReader:
        """One output file (``.digest``, ``.size``, iterate for verified bytes; close it).

        Raises NotFound.
        """
        raise Unavailable("database", "not built yet")

    def put_blob(self, digest: str, source: BinaryIO) -> bool:
        """Store a blob; true if it is new.

        Raises:
            DigestMismatch: the bytes are others; nothing is stored.
            PayloadTooLarge: more than ``max_disk`` MiB.
        """
        raise Unavailable("database", "not built yet")

    def has_blob(self, digest: str) -> bool:
        """Whether the blob is here."""
        raise Unavailable("database", "not built yet")

    # -- agents

    def claim(self, job_id: str, claim: AttemptClaim) -> JobTicket:
        """Take a job for an attempt; older attempts are fenced off.  Repeatable.

        Raises NotFound; JobFinal; Conflict (CANCELING); AttemptSuperseded (an old attempt again).
        """
        raise Unavailable("database", "not built yet")

    def report(self, job_id: str, attempt: str, report: Report) -> None:
        """Take one report of the current attempt.

        Raises NotFound; JobFinal; AttemptSuperseded; Conflict (a step the table does not have);
        InvalidRequest (a state that is not an agent's to report).
        """
        raise Unavailable("database", "not built yet")

    def append(self, job_id: str, attempt: str, stream: StreamName, offset: int, data: bytes) -> None:
        """Add to a stream of the current attempt; what is there already stays as it is.

        Raises NotFound; JobFinal; AttemptSuperseded; Conflict (offset beyond the end).
        """
        raise Unavailable("database", "not built yet")

    def put_output(self, job_id: str, attempt: str, path: str, source: BinaryIO, size: int) -> Output:
        """Store one output file of exactly ``size`` bytes.

        Raises NotFound; JobFinal; AttemptSuperseded; InvalidRequest (path, or size is not what
        came); PayloadTooLarge (outputs together beyond the job's disk).
        """
        raise Unavailable("database", "not built yet")

    def open_input(self, job_id: str, name: str) -> BlobReader:
        """One input file by its name in the spec.  Raises NotFound."""
        raise Unavailable("database", "not built yet")

    # -- nodes

    def put_node(self, node: Node) -> None:
        """Remember what a node announces; ``updated`` becomes the time of arrival."""
        raise Unavailable("database", "not built yet")

    def nodes(self, live: bool = False) -> list[Node]:
        """All nodes by name; with ``live`` only those heard of lately."""
        raise Unavailable("database", "not built yet")

    def node(self, name: str) -> Node:
        """One node.  Raises NotFound."""
        raise Unavailable("database", "not built yet")

    # -- health

    def ping(self) -> None:
        """Return if the database answers.  Raises Unavailable("database")."""
        raise Unavailable("database", "not built yet")


def open_repository(config: Config, images: ImageResolver, *, migrate: bool = True) -> Repository:
    """A repository on the database and directories that ``config`` names.

    ``migrate``: bring the database's schema up to date first.
    """
    raise Unavailable("database", "not built yet")
