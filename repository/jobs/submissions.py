"""Operations of users on jobs: submit, cancel, hold and release."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Final

from sqlalchemy import and_, select, update
from sqlalchemy.exc import IntegrityError

from repository.db.ids import new_ids
from repository.db.models import EventRow, JobRow, SubmissionRow
from repository.images import Viewer
from repository.jobs.queries import find_job
from repository.jobs.selection import load_states, select_jobs
from repository.jobs.transitions import move_all
from repository.jobs.validation import missing_inputs, unknown_image, validate_job
from repository.jobs.views import PublishArray, PublishJobs, SubmissionResult, job_views
from repository.nodes import Nodes
from repository.storage.blob_owners import BlobOwnership, mark_blobs_used
from vmjobs.errors import (
    Conflict,
    Fault,
    IdempotencyConflict,
    InvalidRequest,
    InvalidSpec,
    NotFound,
    Unavailable,
)
from vmjobs.job_sets import JobSelection, JobStatus
from vmjobs.model import Job, JobAction, JobSpec, JobState, Reason, ReasonCode, Submission, reason
from vmjobs.model import now as utc_now

logger = logging.getLogger(__name__)
MAX_KEY_LENGTH = 255


class Submissions(Nodes, BlobOwnership):
    """The submitting part of the repository."""

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
        viewer = Viewer(owner, groups)
        nodes = self.live_nodes()
        spec = submission.spec
        image = validate_job(spec, self.config, nodes, self.images, viewer, self.blob_size)
        try:
            parent = _new_submission(owner, submission, key, image.digest)
            return self._store(parent, spec, viewer, publish)
        except IntegrityError as error:  # a concurrent request with the same key was first
            if seen := self._find_earlier(owner, key, body):
                return seen
            raise Unavailable("database", f"the submission was not stored: {error.orig}") from error

    def _find_earlier(self, owner: str, key: str, body: str) -> SubmissionResult | None:
        """Return the jobs of an earlier submission with this key."""
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
                notice = self.images.pin(session, viewer, parent.image_digest)
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
            session.add_all(_new_event(row) for row in rows)
            result = SubmissionResult(parent.id, job_views(session, rows), True)
            if publish is not None:
                publish(parent.id)
        return result

    def cancel(self, job_id: str, owner: str | None = None, publish: PublishJobs | None = None) -> Job:
        """Cancel a job, as :meth:`change_jobs`; repeating the call is no error.

        Raises NotFound; Conflict for a job that has ended by itself.
        """
        with self.database.read() as session:
            find_job(session, job_id, owner)  # refuse ids of arrays
        self.change_jobs(JobAction.CANCEL, JobSelection(jobs=(job_id,)), owner, publish)
        with self.database.read() as session:
            (job,) = job_views(session, [find_job(session, job_id, owner)])
        if job.state.final and job.state is not JobState.CANCELED:
            raise Conflict(f"the job is {job.state} already: there is nothing to cancel")
        return job

    def change_jobs(
        self,
        action: JobAction,
        selection: JobSelection,
        owner: str | None = None,
        publish: PublishJobs | None = None,
    ) -> list[JobStatus]:
        """Cancel, hold or release jobs; return the state of each job now.

        Jobs whose state does not allow the action stay unchanged. A canceled job is CANCELING at once;
        further changes of submitted jobs follow from the scheduler. ``publish`` is called for them
        after the commit; if it fails, the worker's sweep finds the canceled jobs.

        Raises:
            NotFound: one of them does not exist; then nothing is done.
            AmbiguousId: several ids begin with one of them.
            InvalidRequest: more than ``MAX_SELECTED_JOBS`` jobs.
            Unavailable: what ``publish`` raises, when jobs are held or released.
        """
        before, after, why = _OWNER_ACTIONS[action]
        nowhere = and_(JobRow.dispatched.is_(None), JobRow.attempt == "")
        with self.database.write() as session:
            ids = select_jobs(session, selection, owner)
            if action is JobAction.CANCEL:
                move_all(session, ids, before, why)
            chosen = and_(JobRow.id.in_(ids), JobRow.state == before.value)
            never = session.scalars(select(JobRow.id).where(chosen, nowhere)).all()
            changed = JobRow.id.in_(move_all(session, never, after, why))
            session.execute(update(JobRow).where(changed).values(settled=after.final))
            found = load_states(session, ids)
        live = [job.id for job in found if not job.state.final]
        if publish is not None and live:
            try:
                publish(action, live)
            except Unavailable as error:
                if action is not JobAction.CANCEL:
                    raise
                logger.warning("canceling waits for the next sweep: %s", error.message)
        return found


#: Old state, new state and reason for each action on jobs that no scheduler has.
_OWNER_ACTIONS: Final[Mapping[JobAction, tuple[JobState, JobState, Reason]]] = {
    JobAction.CANCEL: (
        JobState.CANCELING,
        JobState.CANCELED,
        reason(ReasonCode.USER_CANCELED, "canceled by its owner"),
    ),
    JobAction.HOLD: (
        JobState.QUEUED,
        JobState.HELD,
        reason(ReasonCode.USER_HELD, "held by its owner"),
    ),
    JobAction.RELEASE: (
        JobState.HELD,
        JobState.QUEUED,
        reason(ReasonCode.RELEASED, "released by its owner"),
    ),
}


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


def _new_event(row: JobRow) -> EventRow:
    return EventRow(
        job_id=row.id,
        seq=1,
        time=row.created,
        state=row.state,
        reason_code=row.reason_code,
        reason_message=row.reason_message,
        reason_actor=row.reason_actor,
    )
