"""Submissions of jobs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from repository.db.database import Database
from repository.db.ids import new_ids
from repository.db.models import JobRow, SubmissionRow
from repository.images import Viewer
from repository.images.catalog import Catalog
from repository.images.holdings import pin_image
from repository.jobs.transitions import new_event
from repository.jobs.validation import missing_inputs, unknown_image, validate_job
from repository.jobs.views import PublishArray, SubmissionResult, job_views
from repository.nodes import Nodes
from repository.storage.blob_owners import BlobOwners, mark_blobs_used
from vmjobs.config import Config
from vmjobs.errors import (
    Fault,
    IdempotencyConflict,
    InvalidRequest,
    InvalidSpec,
    NotFound,
    Unavailable,
)
from vmjobs.model import JobSpec, JobState, ReasonCode, Submission, reason
from vmjobs.model import now as utc_now

MAX_KEY_LENGTH: Final = 255


@dataclass(frozen=True)
class Submissions:
    """Stores submissions, and publishes them to the worker."""

    database: Database
    catalog: Catalog
    nodes: Nodes
    blob_owners: BlobOwners
    config: Config

    def submit(
        self,
        owner: str,
        submission: Submission,
        key: str = "",
        publish: PublishArray | None = None,
        groups: frozenset[str] = frozenset(),
    ) -> SubmissionResult:
        """Store ``count`` jobs and publish the array's id before the commit.

        groups: of the owner; images that are shared with them may be used, too.

        ``publish`` may be called for an array whose commit then fails, never the other way round.

        Raises:
            InvalidSpec: with every fault (limits, image, inputs, resources that no live node has).
            InvalidRequest: the key is too long.
            IdempotencyConflict: ``key`` was used with another body.
            Unavailable: what ``publish`` raises (``broker``); then nothing is stored.
        """
        if len(key) > MAX_KEY_LENGTH or not key.isprintable():
            fault = Fault(
                "Idempotency-Key", "bad_key", f"at most {MAX_KEY_LENGTH} printable characters"
            )
            raise InvalidRequest("the idempotency key is refused", faults=[fault])
        body = body_digest(submission)
        if seen := self._find_earlier(owner, key, body):
            return seen
        viewer, spec = Viewer(owner, groups), submission.spec
        image = self.validate(spec, viewer)
        try:
            parent = _new_submission(owner, submission, key, image)
            return self._store(parent, spec, viewer, publish)
        except IntegrityError as error:  # a concurrent request with the same key was first
            if seen := self._find_earlier(owner, key, body):
                return seen
            raise Unavailable("database", f"the submission was not stored: {error.orig}") from error

    def validate(self, spec: JobSpec, viewer: Viewer) -> str:
        """Validate a job that the viewer would submit; return the digest of its image.

        Raises InvalidSpec with every fault.
        """
        nodes, size_of = self.nodes.live(), self.blob_owners.size
        return validate_job(spec, self.config, nodes, self.catalog, viewer, size_of)

    def _find_earlier(self, owner: str, key: str, body: str) -> SubmissionResult | None:
        if not key:
            return None
        with self.database.read() as session:
            earlier = session.scalars(
                select(SubmissionRow).where(SubmissionRow.owner == owner, SubmissionRow.key == key)
            ).one_or_none()
            if earlier is None:
                return None
            if earlier.body_digest != body:
                raise IdempotencyConflict(
                    "this idempotency key was used for another submission",
                    hint="use a fresh key for each new submission",
                )
            rows = session.scalars(
                select(JobRow).where(JobRow.array_id == earlier.id).order_by(JobRow.index)
            ).all()
            return SubmissionResult(earlier.id, job_views(session, rows), False)

    def _store(
        self, parent: SubmissionRow, spec: JobSpec, viewer: Viewer, publish: PublishArray | None
    ) -> SubmissionResult:
        ids = new_ids(parent.count)
        with self.database.write() as session:
            try:
                # From here on the image stays: a concurrent removal waits, and finds the jobs.
                notice = pin_image(session, viewer, parent.image_digest)
            except NotFound as error:
                faults = [unknown_image(error)]
                raise InvalidSpec("the job cannot run here", faults=faults) from error
            lost = mark_blobs_used(session, parent.owner, {file.digest for file in spec.inputs})
            if faults := list(missing_inputs(spec, lost)):  # collected a moment ago
                raise InvalidSpec("the job cannot run here", faults=faults)
            session.add(parent)
            session.flush()  # check that the key is unique before publishing
            rows = [_new_job(parent, job, number, notice) for number, job in enumerate(ids)]
            session.add_all(rows)
            session.flush()
            session.add_all(new_event(row, row.created) for row in rows)
            result = SubmissionResult(parent.id, job_views(session, rows), True)
            if publish is not None:
                publish(parent.id)
        return result


def body_digest(submission: Submission) -> str:
    """Return the digest of a submission; giving a default value explicitly does not change it."""
    text = json.dumps(submission.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _new_submission(owner: str, submission: Submission, key: str, image: str) -> SubmissionRow:
    return SubmissionRow(
        id=new_ids(1)[0],
        owner=owner,
        key=key or None,
        body_digest=body_digest(submission),
        created=utc_now(),
        count=submission.count,
        image_digest=image,
        spec=submission.spec.model_dump(mode="json"),
    )


def _new_job(parent: SubmissionRow, job_id: str, index: int, notice: str) -> JobRow:
    text = "accepted; waiting for the scheduler"
    why = reason(ReasonCode.SUBMITTED, f"{text}; its image is deprecated: {notice}" if notice else text)
    return JobRow(
        id=job_id,
        array_id=parent.id,
        submission=parent,
        index=index,
        owner=parent.owner,
        state=JobState.QUEUED.value,
        reason_code=why.code.value,
        reason_message=why.message,
        reason_actor=why.actor.value,
        created=parent.created,
        updated=parent.created,
        events_count=1,
    )
