"""The agents' calls: claim a job, report, deliver streams and outputs.

A newer claim fences off older attempts: all their calls fail with AttemptSuperseded.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import BinaryIO, Final

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from repository.db.database import Database
from repository.db.ids import is_id
from repository.db.models import AttemptRow, EventRow, JobRow, OutputRow
from repository.images.checkpoints import checkpoint_of, keep_checkpoint
from repository.jobs.queries import find_job
from repository.jobs.reports import (
    REPORTABLE,
    apply_state,
    settle_cancel,
    store_report,
    update_settled,
)
from repository.jobs.streams import StreamStore
from repository.jobs.transitions import job_not_found, lock_job, move, record, touch
from repository.jobs.views import spec_of
from repository.storage.blob_owners import BlobOwners, mark_blobs_used
from repository.storage.blobs import BlobStore
from vmjobs.config import Config
from vmjobs.errors import (
    AttemptSuperseded,
    Conflict,
    Fault,
    InvalidRequest,
    JobFinal,
    PayloadTooLarge,
)
from vmjobs.model import (
    MAX_ATTEMPTS,
    MIB,
    ON_NODE_STATES,
    RETRYABLE,
    AttemptClaim,
    Checkpoint,
    JobState,
    JobTicket,
    Output,
    ReasonCode,
    Report,
    StreamName,
    reason,
)
from vmjobs.model import now as utc_now
from vmjobs.paths import check_path

MAX_OUTPUTS: Final = 10_000
#: Stream data proves that an agent is alive; the attempt's row is updated at most this often for it.
HEARD_INTERVAL: Final = timedelta(seconds=10)


@dataclass(frozen=True)
class Attempts:
    """Attempts at jobs, as agents claim and report them."""

    database: Database
    blobs: BlobStore
    blob_owners: BlobOwners
    streams: StreamStore
    config: Config

    def claim(self, job_id: str, claim: AttemptClaim) -> JobTicket:
        """Claim a job for an attempt and fence off older attempts. Repeating the call is no error.

        Raises NotFound; JobFinal; Conflict (CANCELING); AttemptSuperseded (an old attempt again).
        """
        try:
            with self.database.write() as session:
                row = lock_job(session, job_id)
                if row.attempt != claim.attempt:
                    _begin_attempt(session, row, claim)
                elif JobState(row.state).final:
                    raise _final_error(row)
                spec = spec_of(row)
                return JobTicket(
                    job_id=row.id,
                    attempt=claim.attempt,
                    index=row.index,
                    count=row.submission.count,
                    image_digest=row.submission.image_digest,
                    spec=spec,
                    checkpoint=checkpoint_of(session, row.id) if spec.checkpoint else None,
                    tries_left=max(0, MAX_ATTEMPTS - 1 - _count_failed_tries(session, row)),
                )
        except IntegrityError as error:
            raise Conflict(f"attempt id {claim.attempt} is in use for another job") from error

    def report(self, job_id: str, attempt: str, report: Report) -> None:
        """Store one report of the current attempt; reporting the same state again is no error.

        Raises NotFound; JobFinal; AttemptSuperseded; Conflict (TRANSITIONS has no such step);
        InvalidRequest (agents cannot report that state).
        """
        if report.state not in REPORTABLE:
            fault = Fault("state", "not_reportable", f"agents cannot report the state {report.state}")
            raise InvalidRequest("the report is refused", faults=[fault])
        with self.database.write() as session:
            row = lock_job(session, job_id)
            latest_attempt = _current_attempt(session, row, attempt)
            if row.state == report.state and JobState(row.state).final:
                return  # the answer to the first delivery was lost
            if JobState(row.state).final:
                raise _final_error(row)
            store_report(row, latest_attempt, report)
            apply_state(session, row, latest_attempt, report)
            if report.state not in ON_NODE_STATES and report.state is not JobState.CANCELING:
                latest_attempt.ended = latest_attempt.ended or utc_now()
                settle_cancel(session, row, latest_attempt)
            update_settled(row)

    def keep_checkpoint(self, job_id: str, attempt: str, upload: str, checkpoint: Checkpoint) -> None:
        """Store a checkpoint, from which the next attempt resumes. Repeating the call is no error.

        upload: the upload that brought the checkpoint's files; this call closes it.
        Raises NotFound; JobFinal; AttemptSuperseded; Conflict (the job has checkpoints disabled, or is
        being canceled); InvalidRequest (the VM of another job); and as :func:`keep_checkpoint`.
        """
        with self.database.write() as session:
            row = lock_job(session, job_id)
            latest_attempt = _open_attempt(session, row, attempt)
            if row.state == JobState.CANCELING or not spec_of(row).checkpoint:
                raise Conflict(f"job {job_id} is {row.state} and takes no checkpoint")
            if checkpoint_of(session, job_id) == checkpoint:
                return  # the answer to the first delivery was lost
            first = session.get(AttemptRow, checkpoint.machine.rpartition("-")[2])
            if first is None or first.job_id != job_id:
                raise InvalidRequest(f"the VM {checkpoint.machine} does not belong to job {job_id}")
            keep_checkpoint(session, self.config, job_id, row.owner, upload, checkpoint)
            latest_attempt.heard = utc_now()
            touch(row, latest_attempt.heard)

    def append_stream(
        self, job_id: str, attempt: str, stream: StreamName, offset: int, data: bytes
    ) -> None:
        """Append to a stream of the current attempt; bytes that are stored already stay unchanged.

        Raises NotFound; JobFinal; AttemptSuperseded; Conflict (offset beyond the end).
        """
        with self.database.read() as session:
            heard = _open_attempt(session, find_job(session, job_id, None), attempt).heard
        self.streams.append(job_id, attempt, stream, offset, data)
        if utc_now() - heard > HEARD_INTERVAL:
            with self.database.write() as session:
                latest_attempt = _current_attempt(session, lock_job(session, job_id), attempt)
                latest_attempt.heard = utc_now()

    def put_output(self, job_id: str, attempt: str, path: str, source: BinaryIO, size: int) -> Output:
        """Store one output file of exactly ``size`` bytes; the same path again replaces it.

        Raises NotFound; JobFinal; AttemptSuperseded; InvalidRequest (bad path, or ``source`` does not
        have ``size`` bytes); PayloadTooLarge (outputs exceed the job's disk, or are too many).
        """
        why = check_path(path) if path.isprintable() else "the path has unprintable characters"
        if why:
            raise InvalidRequest(
                "the output's path is refused", faults=[Fault("path", "bad_path", why)]
            )
        with self.database.read() as session:
            job = find_job(session, job_id, None)
            _open_attempt(session, job, attempt)
            free_bytes = _free_disk_bytes(session, job, path)
        if not 0 <= size <= free_bytes:
            raise PayloadTooLarge(f"{path} has {size} bytes, the job's disk leaves {free_bytes} for it")
        owner = job.owner
        stored = self.blobs.put(
            source,
            size=size,
            limit=free_bytes,
            admit=lambda digest, length: self.blob_owners.add(owner, digest, length, limited=False),
        )
        with self.database.write() as session:
            row = lock_job(session, job_id)
            latest_attempt = _open_attempt(session, row, attempt)
            if size > _free_disk_bytes(session, row, path):
                raise PayloadTooLarge(f"the outputs together are larger than the job's disk: {path}")
            known = session.scalars(
                select(OutputRow).where(OutputRow.attempt_id == attempt, OutputRow.path == path)
            ).one_or_none()
            if known is None:
                known = OutputRow(attempt_id=attempt, path=path)
                session.add(known)
            known.size, known.digest = stored.size, stored.digest
            mark_blobs_used(session, row.owner, [stored.digest])
            latest_attempt.heard = utc_now()
            touch(row, latest_attempt.heard)
        return Output(path=path, size=stored.size, digest=stored.digest)


def _begin_attempt(session: Session, row: JobRow, claim: AttemptClaim) -> None:
    """Begin a new attempt: fence off the one before, and move the job back to QUEUED."""
    state = JobState(row.state)
    known = session.get(AttemptRow, claim.attempt)
    if known is not None:
        if known.job_id == row.id:
            raise AttemptSuperseded(f"a newer attempt has claimed job {row.id}")
        raise Conflict(f"attempt id {claim.attempt} is in use for another job")
    if state.final:
        raise _final_error(row)
    if state is JobState.CANCELING:
        raise Conflict(f"job {row.id} is being canceled and cannot be claimed")
    before = session.get(AttemptRow, row.attempt) if row.attempt else None
    if state in ON_NODE_STATES:
        same = before is not None and before.node == claim.node
        code = ReasonCode.AGENT_RESTARTED if same else ReasonCode.EVICTED
        text = f"node {claim.node} takes the job anew" if same else f"node {claim.node} takes over"
        move(session, row, JobState.PREEMPTED, reason(code, text))
        move(session, row, JobState.QUEUED, reason(code, text))
    elif state is JobState.PREEMPTED:
        text = f"node {claim.node} takes over"
        move(session, row, JobState.QUEUED, reason(ReasonCode.SCHEDULED, text))
    elif state is JobState.HELD:
        move(session, row, JobState.QUEUED, reason(ReasonCode.RELEASED, "the hold was released"))
    present = utc_now()
    # The first attempt's queue time starts at submission, a later one's at the end of the one before.
    waiting = before.ended or before.heard if before is not None else row.created
    row.attempts += 1
    row.attempt = claim.attempt
    session.add(
        AttemptRow(
            id=claim.attempt,
            job_id=row.id,
            number=row.attempts,
            node=claim.node,
            claimed=present,
            heard=present,
            seconds={"queued": round((present - waiting).total_seconds(), 3)},
        )
    )
    record(session, row, reason(ReasonCode.SCHEDULED, f"claimed by node {claim.node}"))


def _count_failed_tries(session: Session, row: JobRow) -> int:
    """Return how often a node failed the job and returned it for another attempt."""
    if row.attempts < 2:
        return 0  # most jobs: no query needed
    events = select(func.count()).where(
        EventRow.job_id == row.id,
        EventRow.state == JobState.PREEMPTED.value,
        EventRow.reason_code.in_([code.value for code in RETRYABLE]),
    )
    return session.scalar(events) or 0


def _open_attempt(session: Session, row: JobRow, attempt: str) -> AttemptRow:
    """Return the attempt if it may still write.  Raises NotFound, JobFinal, AttemptSuperseded."""
    latest_attempt = _current_attempt(session, row, attempt)
    if JobState(row.state).final:
        raise _final_error(row)
    return latest_attempt


def _current_attempt(session: Session, row: JobRow, attempt: str) -> AttemptRow:
    latest_attempt = session.get(AttemptRow, attempt) if is_id(attempt) else None
    if latest_attempt is None or latest_attempt.job_id != row.id:
        raise job_not_found(f"{row.id} with attempt {attempt[:32]}")
    if row.attempt != attempt:
        raise AttemptSuperseded(f"a newer attempt has claimed job {row.id}")
    return latest_attempt


def _final_error(row: JobRow) -> JobFinal:
    return JobFinal(f"job {row.id} has ended: it is {row.state}")


def _free_disk_bytes(session: Session, row: JobRow, path: str) -> int:
    """Return bytes left on the job's disk for the output ``path``.  Raises PayloadTooLarge."""
    taken, files = session.execute(
        select(func.coalesce(func.sum(OutputRow.size), 0), func.count()).where(
            OutputRow.attempt_id == row.attempt, OutputRow.path != path
        )
    ).one()
    if files >= MAX_OUTPUTS:
        raise PayloadTooLarge(f"more than {MAX_OUTPUTS} output files")
    return max(0, spec_of(row).disk * MIB - int(taken))
