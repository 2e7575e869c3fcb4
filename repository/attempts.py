"""The agents' calls: claim a job, report, deliver streams and outputs.

A newer claim fences off older attempts: all their calls fail with AttemptSuperseded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import BinaryIO, Final

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from repository.decide import GONE, Step
from repository.ids import is_id
from repository.images.keeping import checkpoint_of, note_not_resumed
from repository.models import AttemptRow, EventRow, JobRow, OutputRow
from repository.possession import Possession, use_blobs
from repository.reading import visible
from repository.transitions import locked, missing, move, record, touch
from repository.views import spec_of
from vmjobs.errors import (
    AttemptSuperseded,
    Conflict,
    Fault,
    InvalidRequest,
    JobFinal,
    PayloadTooLarge,
)
from vmjobs.model import (
    MAX_TRIES,
    MENDED_ELSEWHERE,
    MIB,
    ON_NODE,
    Actor,
    AttemptClaim,
    Checkpoint,
    JobState,
    JobTicket,
    Output,
    Reason,
    ReasonCode,
    Report,
    StreamName,
    reason,
)
from vmjobs.model import now as utc_now
from vmjobs.paths import refusal
from vmjobs.ports import BatchStatus

MAX_OUTPUTS: Final = 10_000
MAX_PHASES: Final = 32
#: Stream data proves that an agent is alive; the attempt's row is updated at most this often for it.
HEARD_EVERY: Final = timedelta(seconds=10)
#: States that an agent may report.
REPORTABLE: Final = ON_NODE | {
    JobState.COMPLETED,
    JobState.FAILED,
    JobState.CANCELING,
    JobState.CANCELED,
    JobState.PREEMPTED,
}
#: States that a stale observation of the scheduler may give to a job whose agent still works.
PUSHED_BACK: Final = frozenset({JobState.QUEUED, JobState.HELD, JobState.PREEMPTED})
_UP: Final = (JobState.STAGING, JobState.BOOTING, JobState.RUNNING, JobState.COLLECTING)


class Attempts(Possession):
    """The part of the repository that agents call."""

    def claim(self, job_id: str, claim: AttemptClaim) -> JobTicket:
        """Claim a job for an attempt and fence off older attempts. Repeating the call is no error.

        Raises NotFound; JobFinal; Conflict (CANCELING); AttemptSuperseded (an old attempt again).
        """
        try:
            with self.database.write() as session:
                row = locked(session, job_id)
                if row.attempt != claim.attempt:
                    _start(session, row, claim)
                elif JobState(row.state).final:
                    raise _ended(row)
                spec = spec_of(row)
                return JobTicket(
                    job_id=row.id,
                    attempt=claim.attempt,
                    index=row.index,
                    count=row.submission.count,
                    image_digest=row.submission.image_digest,
                    spec=spec,
                    checkpoint=checkpoint_of(session, row.id) if spec.checkpoint else None,
                    tries_left=max(0, MAX_TRIES - 1 - _failed_tries(session, row)),
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
            row = locked(session, job_id)
            tried = _current(session, row, attempt)
            if row.state == report.state and JobState(row.state).final:
                return  # the answer to the first delivery was lost
            if JobState(row.state).final:
                raise _ended(row)
            _note_facts(row, tried, report)
            _follow(session, row, tried, report)
            if report.state not in ON_NODE and report.state is not JobState.CANCELING:
                tried.ended = tried.ended or utc_now()
                _settle_cancel(session, row, tried)
            settle(row)

    def keep(self, job_id: str, attempt: str, upload: str, checkpoint: Checkpoint) -> None:
        """Store a checkpoint, from which the next attempt resumes. Repeating the call is no error.

        upload: the upload that brought the checkpoint's files; this call closes it.
        Raises NotFound; JobFinal; AttemptSuperseded; Conflict (the job has checkpoints disabled, or is
        being canceled); InvalidRequest (the VM of another job); and as ``Images.keep_checkpoint``.
        """
        with self.database.write() as session:
            row = locked(session, job_id)
            tried = _current(session, row, attempt)
            if JobState(row.state).final:
                raise _ended(row)
            if row.state == JobState.CANCELING or not spec_of(row).checkpoint:
                raise Conflict(f"job {job_id} is {row.state} and takes no checkpoint")
            if checkpoint_of(session, job_id) == checkpoint:
                return  # the answer to the first delivery was lost
            first = session.get(AttemptRow, checkpoint.machine.rpartition("-")[2])
            if first is None or first.job_id != job_id:
                raise InvalidRequest(f"the VM {checkpoint.machine} does not belong to job {job_id}")
            self.images.keep_checkpoint(session, job_id, row.owner, upload, checkpoint)
            tried.heard = utc_now()
            touch(row, tried.heard)

    def append(self, job_id: str, attempt: str, stream: StreamName, offset: int, data: bytes) -> None:
        """Append to a stream of the current attempt; bytes that are stored already stay unchanged.

        Raises NotFound; JobFinal; AttemptSuperseded; Conflict (offset beyond the end).
        """
        with self.database.read() as session:
            heard = _open_attempt(session, job_id, attempt).heard
        self.streams.append(job_id, attempt, stream, offset, data)
        if utc_now() - heard > HEARD_EVERY:
            with self.database.write() as session:
                tried = _current(session, locked(session, job_id), attempt)
                tried.heard = utc_now()

    def put_output(self, job_id: str, attempt: str, path: str, source: BinaryIO, size: int) -> Output:
        """Store one output file of exactly ``size`` bytes; the same path again replaces it.

        Raises NotFound; JobFinal; AttemptSuperseded; InvalidRequest (bad path, or ``source`` does not
        have ``size`` bytes); PayloadTooLarge (outputs exceed the job's disk, or are too many).
        """
        why = refusal(path) if path.isprintable() else "the path has unprintable characters"
        if why:
            raise InvalidRequest(
                "the output's path is refused", faults=[Fault("path", "bad_path", why)]
            )
        with self.database.read() as session:
            _open_attempt(session, job_id, attempt)
            job = visible(session, job_id, None)
            room = _room(session, job, path)
        if not 0 <= size <= room:
            raise PayloadTooLarge(f"{path} has {size} bytes, the job's disk leaves {room} for it")
        owner = job.owner
        stored = self.blobs.put(
            source,
            size=size,
            limit=room,
            admit=lambda digest, length: self.possess(owner, digest, length, limited=False),
        )
        with self.database.write() as session:
            row = locked(session, job_id)
            tried = _current(session, row, attempt)
            if JobState(row.state).final:
                raise _ended(row)
            if size > _room(session, row, path):
                raise PayloadTooLarge(f"the outputs together are larger than the job's disk: {path}")
            known = session.scalars(
                select(OutputRow).where(OutputRow.attempt_id == attempt, OutputRow.path == path)
            ).one_or_none()
            if known is None:
                known = OutputRow(attempt_id=attempt, path=path)
                session.add(known)
            known.size, known.digest = stored.size, stored.digest
            use_blobs(session, row.owner, [stored.digest])
            tried.heard = utc_now()
            touch(row, tried.heard)
        return Output(path=path, size=stored.size, digest=stored.digest)


def settle(row: JobRow) -> None:
    """Update ``settled``: the job is final and the scheduler has nothing of it any more."""
    gone = row.dispatched is None or row.batch_status in {status.value for status in GONE}
    row.settled = JobState(row.state).final and gone


def _start(session: Session, row: JobRow, claim: AttemptClaim) -> None:
    """Begin a new attempt: fence off the one before, and move the job back to QUEUED."""
    state = JobState(row.state)
    known = session.get(AttemptRow, claim.attempt)
    if known is not None:
        if known.job_id == row.id:
            raise AttemptSuperseded(f"a newer attempt has claimed job {row.id}")
        raise Conflict(f"attempt id {claim.attempt} is in use for another job")
    if state.final:
        raise _ended(row)
    if state is JobState.CANCELING:
        raise Conflict(f"job {row.id} is being canceled and cannot be claimed")
    before = session.get(AttemptRow, row.attempt) if row.attempt else None
    if state in ON_NODE:
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
            reached="",
            seen_running=False,
            seconds={"queued": round((present - waiting).total_seconds(), 3)},
            bytes={},
            cpu_seconds=0.0,
            rejected=[],
        )
    )
    record(session, row, reason(ReasonCode.SCHEDULED, f"claimed by node {claim.node}"))


def _failed_tries(session: Session, row: JobRow) -> int:
    """Return how often a node failed the job and returned it for another attempt."""
    if row.attempts < 2:
        return 0  # most jobs: no query needed
    events = select(func.count()).where(
        EventRow.job_id == row.id,
        EventRow.state == JobState.PREEMPTED.value,
        EventRow.reason_code.in_([code.value for code in MENDED_ELSEWHERE]),
    )
    return session.scalar(events) or 0


def _open_attempt(session: Session, job_id: str, attempt: str) -> AttemptRow:
    """Return the attempt if it may still write.  Raises NotFound, JobFinal, AttemptSuperseded."""
    row = visible(session, job_id, None)
    tried = _current(session, row, attempt)
    if JobState(row.state).final:
        raise _ended(row)
    return tried


def _current(session: Session, row: JobRow, attempt: str) -> AttemptRow:
    tried = session.get(AttemptRow, attempt) if is_id(attempt) else None
    if tried is None or tried.job_id != row.id:
        raise missing(f"{row.id} with attempt {attempt[:32]}")
    if row.attempt != attempt:
        raise AttemptSuperseded(f"a newer attempt has claimed job {row.id}")
    return tried


def _ended(row: JobRow) -> JobFinal:
    return JobFinal(f"job {row.id} has ended: it is {row.state}")


def _note_facts(row: JobRow, tried: AttemptRow, report: Report) -> None:
    """Store the report's data besides the state, even if the state itself is not applied."""
    tried.heard = utc_now()
    if report.hypervisor is not None:
        tried.hypervisor = report.hypervisor.value
    if report.exit is not None:
        tried.exit = report.exit.model_dump(mode="json")
    if report.seconds:
        tried.seconds = {**tried.seconds, **_sane(report.seconds)}
    if report.bytes:
        tried.bytes = {**tried.bytes, **report.bytes}
    tried.cpu_seconds = max(tried.cpu_seconds, report.cpu_seconds)
    if report.rejected:
        tried.rejected = [item.model_dump(mode="json") for item in report.rejected]
    touch(row, tried.heard)


def _sane(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the valid phase times, at most ``MAX_PHASES``; JSON has no NaN."""
    fit = {k[:64]: v for k, v in seconds.items() if math.isfinite(v) and v >= 0 and "\0" not in k}
    return dict(list(fit.items())[:MAX_PHASES])


def _follow(session: Session, row: JobRow, tried: AttemptRow, report: Report) -> None:
    """Move the job to the reported state, as far as TRANSITIONS allows."""
    at = report.time if report.time.tzinfo else report.time.replace(tzinfo=UTC)
    if row.state == JobState.CANCELING:
        if _ends_canceling(report):  # the scheduler decides whether the job ended or was canceled
            why = report.reason.model_dump(mode="json")
            tried.ending = {"state": report.state.value, "reason": why}
        return
    if report.reason.code is ReasonCode.NOT_RESUMED and tried.ended is None:
        note_not_resumed(session, row.id)
    if row.state in PUSHED_BACK and tried.reached and tried.ended is None:
        if report.state is JobState.PREEMPTED:
            return
        if report.state in ON_NODE or report.state is JobState.COMPLETED:
            _catch_up(session, row, JobState(tried.reached), at)
    if row.state == report.state:
        return
    if report.state is JobState.CANCELED:
        # The VM is gone; the scheduler decides when the job is over.
        move(session, row, JobState.CANCELING, report.reason, at=at)
        return
    move(session, row, report.state, report.reason, at=at)
    tried.reached = report.state.value


def ending_of(tried: AttemptRow) -> Step | None:
    """Return how the attempt ended by itself while its job was being canceled, if it did."""
    if tried.ending is None:
        return None
    return Step(JobState(tried.ending["state"]), Reason.model_validate(tried.ending["reason"]))


def _ends_canceling(report: Report) -> bool:
    """Whether a job that is being canceled ended by itself, before the cancel reached it.

    A script that is killed, or a VM that is lost, during the cancel is the cancel's own result.
    """
    if report.state is JobState.FAILED:
        return report.reason.actor is Actor.USER and report.reason.code not in {
            ReasonCode.SCRIPT_KILLED,
            ReasonCode.NO_EXIT_REPORT,
            ReasonCode.USER_CANCELED,
        }
    return report.state is JobState.COMPLETED


def _catch_up(session: Session, row: JobRow, reached: JobState, at: datetime) -> None:
    """Correct a stale observation: return the job to the state that its agent reached."""
    if reached not in ON_NODE:
        return
    why = reason(ReasonCode.PROGRESS, "the node is still at work on the job")
    if row.state != JobState.QUEUED:
        move(session, row, JobState.QUEUED, why, at=at)
    target = JobState.RUNNING if reached is JobState.SUSPENDED else reached
    for state in _UP[: _UP.index(target) + 1]:
        move(session, row, state, why, at=at)
    if reached is JobState.SUSPENDED:
        move(session, row, reached, why, at=at)


def _settle_cancel(session: Session, row: JobRow, tried: AttemptRow) -> None:
    """End a canceled job once both its VM and its batch job are gone."""
    if row.state != JobState.CANCELING:
        return
    ending, completed = ending_of(tried), row.batch_status == BatchStatus.COMPLETED
    if ending is not None and (completed or row.dispatched is None):
        move(session, row, ending.state, ending.reason)
        return
    gone = row.batch_status and BatchStatus(row.batch_status) in GONE
    if gone or row.dispatched is None:
        code = ReasonCode(row.reason_code)
        move(
            session,
            row,
            JobState.CANCELED,
            reason(code, "canceled; the virtual machine is gone"),
        )


def _room(session: Session, row: JobRow, path: str) -> int:
    """Return bytes left on the job's disk for the output ``path``.  Raises PayloadTooLarge."""
    taken, files = session.execute(
        select(func.coalesce(func.sum(OutputRow.size), 0), func.count()).where(
            OutputRow.attempt_id == row.attempt, OutputRow.path != path
        )
    ).one()
    if files >= MAX_OUTPUTS:
        raise PayloadTooLarge(f"more than {MAX_OUTPUTS} output files")
    return max(0, spec_of(row).disk * MIB - int(taken))
