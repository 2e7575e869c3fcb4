"""Synchronizes jobs with HTCondor: jobs to submit or remove, and observed job states."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Select, and_, func, or_, select, update
from sqlalchemy.orm import Session

from repository.db.database import Database
from repository.db.models import AttemptRow, JobRow, SubmissionRow
from repository.db.sql import batches
from repository.images.access import manifest_of
from repository.jobs.pending_jobs import (
    IS_PENDING,
    batch_job_fields,
    choose_arrays,
    select_pending_jobs,
)
from repository.jobs.reports import ending_of, update_settled
from repository.jobs.state_policy import ABSENT_STATUSES, RecordedJob, StateChange, decide
from repository.jobs.transitions import move, record, set_reason, touch
from repository.jobs.views import latest_attempts, ref_of
from vmjobs.batch import BatchJob, BatchStatus, Observation
from vmjobs.errors import NotFound, Unavailable
from vmjobs.job_sets import MAX_SELECTED_JOBS
from vmjobs.model import CondorRef, JobState, ReasonCode, reason
from vmjobs.model import now as utc_now

_ABSENT = [status.value for status in ABSENT_STATUSES]
_FINAL = [state.value for state in JobState if state.final]
_CANCELED = [JobState.CANCELING.value, JobState.CANCELED.value]
PAGE = 1000
#: Jobs changed in one transaction: enough to share a commit, few enough not to delay others.
ROWS_PER_TRANSACTION = 50


@dataclass(frozen=True)
class JobToRemove:
    """A job to remove from the scheduler. ``ref`` is None if its submission is not confirmed.

    why: the reason that HTCondor records.
    """

    id: str
    ref: CondorRef | None
    why: str


def _removal_reason(state: JobState) -> str:
    return "canceled" if state.value in _CANCELED else f"the job is {state} already"


@dataclass(frozen=True)
class CondorSync:
    """Jobs as the worker passes them to HTCondor and observes them there."""

    database: Database

    # -- to the scheduler

    def begin_dispatch(self, limit: int, skip: Collection[str] = ()) -> list[BatchJob]:
        """Mark pending jobs as dispatched and return them without tokens: whole arrays, in turn.

        Owners take turns. limit: jobs at most, but the first array is always taken. skip: arrays that
        have to wait. From now on, canceling one of these jobs involves the scheduler.
        """
        counts = (
            select(JobRow.array_id, JobRow.owner, func.count())
            .where(*IS_PENDING, JobRow.array_id.not_in(skip))
            .group_by(JobRow.array_id, JobRow.owner)
            .order_by(JobRow.array_id)
        )
        with self.database.write() as session:
            chosen = choose_arrays([(row[0], row[1], row[2]) for row in session.execute(counts)], limit)
            rows = (
                session.scalars(select_pending_jobs(*chosen).with_for_update(of=JobRow)).all()
                if chosen
                else []
            )
            mark = update(JobRow).where(JobRow.id.in_([row.id for row in rows]))
            session.execute(mark.values(dispatched=utc_now()))
            parents = session.scalars(select(SubmissionRow).where(SubmissionRow.id.in_(chosen))).all()
            images = {parent.image_digest for parent in parents}
            manifests = {image: manifest_of(session, image) for image in images}
            asked = {
                parent.id: batch_job_fields(parent, manifests[parent.image_digest])
                for parent in parents
            }
            ready = [
                BatchJob(row.id, row.array_id, row.index, row.owner, **asked[row.array_id])
                for row in rows
            ]
        turn = {array: number for number, array in enumerate(chosen)}
        return sorted(ready, key=lambda job: (turn[job.array], job.index))

    def record_condor(self, refs: Mapping[str, CondorRef]) -> list[JobToRemove]:
        """Store the jobs' HTCondor ids; return the jobs that ended meanwhile and must be removed."""
        unwanted = []
        for session, row, _ in self._locked_jobs(sorted(refs)):
            self._store_ref(session, row, refs[row.id])
            state = JobState(row.state)
            if state.final or state is JobState.CANCELING:
                unwanted.append(JobToRemove(row.id, refs[row.id], _removal_reason(state)))
        return unwanted

    def _locked_jobs(self, ids: Sequence[str]) -> Iterator[tuple[Session, JobRow, AttemptRow | None]]:
        """Yield each job, locked, with its session and latest attempt; jobs share transactions."""
        for some in batches(ids, ROWS_PER_TRANSACTION):
            query = select(JobRow).where(JobRow.id.in_(some)).order_by(JobRow.id)
            with self.database.write() as session:
                rows = session.scalars(query.with_for_update(of=JobRow)).all()
                attempts = latest_attempts(session, rows)
                for row in rows:
                    yield session, row, attempts.get(row.attempt)

    def note_unavailable(self, arrays: Collection[str], message: str) -> None:
        """Set the reason why waiting jobs of these arrays wait, once, without a line of history."""
        with self.database.write() as session:
            for row in session.scalars(
                select_pending_jobs(*arrays)
                .where(JobRow.reason_code != ReasonCode.SCHEDULER_UNAVAILABLE.value)
                .with_for_update(of=JobRow)
            ):
                set_reason(row, reason(ReasonCode.SCHEDULER_UNAVAILABLE, message), utc_now())

    def refuse(self, array: str, message: str) -> None:
        """Fail the array's waiting jobs, because the scheduler side cannot submit them."""
        with self.database.write() as session:
            for row in session.scalars(select_pending_jobs(array).with_for_update(of=JobRow)):
                move(session, row, JobState.FAILED, reason(ReasonCode.INTERNAL, message))
                update_settled(row)

    # -- work lists

    def active_arrays(self) -> list[str]:
        """Arrays with jobs at the scheduler."""
        active = (JobRow.settled.is_(False), JobRow.dispatched.is_not(None))
        return self._ids(select(JobRow.array_id).where(*active).distinct())

    def at_scheduler(self) -> list[str]:
        """Ids of non-final jobs that have a place at the scheduler."""
        return self._ids(
            select(JobRow.id).where(
                JobRow.settled.is_(False), JobRow.state.not_in(_FINAL), JobRow.cluster.is_not(None)
            )
        )

    def _ids(self, query: Select[str]) -> list[str]:
        with self.database.read() as session:
            return list(session.scalars(query))

    def require_array(self, array: str) -> None:
        """Raises NotFound: the submission was not committed (yet)."""
        with self.database.read() as session:
            if session.get(SubmissionRow, array) is None:
                raise NotFound(f"there is no array {array[:64]}")

    def has_pending_jobs(self, skip: Collection[str] = ()) -> bool:
        """Whether there are pending jobs outside of the arrays in ``skip``."""
        query = select(JobRow.id).where(*IS_PENDING, JobRow.array_id.not_in(skip)).limit(1)
        with self.database.read() as session:
            return session.scalar(query) is not None

    def placed(self, ids: Sequence[str], states: Collection[JobState]) -> list[CondorRef]:
        """Return the HTCondor ids of those jobs that are in one of these states.

        Raises Unavailable: one of the jobs is just being submitted.
        """
        query = select(JobRow).where(
            JobRow.id.in_(ids),
            JobRow.state.in_([state.value for state in states]),
            JobRow.dispatched.is_not(None),
        )
        with self.database.read() as session:
            refs = [ref_of(row) for row in session.scalars(query)]
        if None in refs:
            raise Unavailable("schedd", "jobs that are to be held are being submitted")
        return [ref for ref in refs if ref is not None]

    def jobs_to_remove(self, ids: Sequence[str]) -> list[JobToRemove]:
        """Return those of these jobs that have to be removed from the scheduler."""
        query = select(JobRow).where(
            JobRow.id.in_(ids),
            JobRow.settled.is_(False),
            JobRow.state.in_([*_FINAL, JobState.CANCELING.value]),
            JobRow.batch_status.not_in(_ABSENT),
        )
        with self.database.read() as session:
            return [
                JobToRemove(row.id, ref_of(row), _removal_reason(JobState(row.state)))
                for row in session.scalars(query)
            ]

    def overdue_removals(self, canceled: timedelta, ended: timedelta) -> list[str]:
        """Return jobs that may be at the scheduler so long after they were canceled or ended."""
        now = utc_now()
        overdue = or_(
            JobRow.state.in_(_CANCELED) & (JobRow.updated < now - canceled),
            JobRow.state.in_(_FINAL) & (JobRow.updated < now - ended),
        )
        return self._ids(
            select(JobRow.id)
            .where(JobRow.settled.is_(False), JobRow.batch_status.not_in(_ABSENT), overdue)
            .order_by(JobRow.id)
            .limit(MAX_SELECTED_JOBS)
        )

    def finished_arrays(self) -> list[str]:
        """Arrays whose jobs are all settled and whose spool directory still exists."""
        open_jobs = (
            select(JobRow.id)
            .where(JobRow.array_id == SubmissionRow.id, JobRow.settled.is_(False))
            .exists()
        )
        finished = (SubmissionRow.forgotten.is_(False), ~open_jobs)
        return self._ids(select(SubmissionRow.id).where(*finished).limit(PAGE))

    def mark_forgotten(self, array: str) -> None:
        """Record that the array's spool directory is removed."""
        with self.database.write() as session:
            row = session.get(SubmissionRow, array)
            if row is not None:
                row.forgotten = True

    # -- from the scheduler

    def observe(self, seen: Sequence[Observation], asked: datetime | None = None) -> None:
        """Store observations of the scheduler and move the jobs accordingly.

        asked: when the schedd was queried, because event logs may have brought newer observations
        since.  An observation of an unknown job is ignored.
        """
        for some in batches(sorted(seen, key=lambda item: item.job_id), PAGE):
            news = {item.job_id: item for item in self._relevant_of(some, asked)}
            for session, row, latest_attempt in self._locked_jobs(list(news)):
                self._apply(session, row, latest_attempt, news[row.id], asked)

    def _relevant_of(self, seen: Sequence[Observation], asked: datetime | None) -> list[Observation]:
        """Return the observations that change something; most change nothing, and need no lock."""
        with self.database.read() as session:
            query = select(JobRow).where(JobRow.id.in_([item.job_id for item in seen]))
            rows = {row.id: row for row in session.scalars(query)}
            attempts = latest_attempts(session, rows.values())
            return [
                item
                for item in seen
                if (row := rows.get(item.job_id)) is not None
                and _is_relevant(row, attempts.get(row.attempt), item, asked)
            ]

    def observe_waiting(self) -> None:
        """Decide again about jobs whose grace period may have ended."""
        waiting = or_(
            JobRow.batch_status.in_(_ABSENT),
            and_(
                JobRow.batch_status == BatchStatus.IDLE.value,
                JobRow.state != JobState.QUEUED.value,
            ),
        )
        query = select(JobRow).where(JobRow.settled.is_(False), JobRow.state.not_in(_FINAL), waiting)
        with self.database.read() as session:
            again = [_stored_observation(row) for row in session.scalars(query)]
        self.observe(again)

    def _apply(
        self,
        session: Session,
        row: JobRow,
        latest_attempt: AttemptRow | None,
        seen: Observation,
        asked: datetime | None,
    ) -> None:
        if not _is_relevant(row, latest_attempt, seen, asked):
            return
        present = utc_now()
        if seen.status is not BatchStatus.MISSING:
            self._store_ref(session, row, seen.ref)
        if row.batch_status != seen.status:
            row.batch_status, row.batch_since = seen.status.value, present
        row.batch_reason = _reason_text(seen)
        row.batch_exit = _exit_text(seen)
        if latest_attempt is not None and _is_first_running(latest_attempt, seen):
            latest_attempt.seen_running = True
        for step in _decide_changes(row, latest_attempt, seen, present):
            move(session, row, step.state, step.reason)
        update_settled(row)

    def _store_ref(self, session: Session, row: JobRow, ref: CondorRef) -> None:
        """Store a job's HTCondor id; the first one stays, its grid job id may change."""
        if row.cluster is None:
            row.schedd, row.cluster, row.proc = ref.schedd, ref.cluster, ref.proc
            row.grid_job_id = ref.grid_job_id[:512]
            row.dispatched = row.dispatched or utc_now()
            text = f"queued at schedd {ref.schedd} as {ref.cluster}.{ref.proc}"
            if row.state == JobState.QUEUED and not row.attempt:
                record(session, row, reason(ReasonCode.SCHEDULED, text))
            else:
                touch(row, utc_now())
        elif ref.grid_job_id and row.grid_job_id != ref.grid_job_id[:512]:
            row.grid_job_id = ref.grid_job_id[:512]
            touch(row, utc_now())


def _decide_changes(
    row: JobRow, latest_attempt: AttemptRow | None, seen: Observation, present: datetime
) -> list[StateChange]:
    same = row.batch_status == seen.status and row.batch_since is not None
    facts = RecordedJob(
        state=JobState(row.state),
        code=ReasonCode(row.reason_code),
        since=row.batch_since if same and row.batch_since else present,
        claimed=latest_attempt is not None,
        ended=latest_attempt is not None and latest_attempt.ended is not None,
        ending=ending_of(latest_attempt) if latest_attempt else None,
        heard=latest_attempt.heard if latest_attempt else None,
        seen_running=latest_attempt is not None and latest_attempt.seen_running,
    )
    return decide(facts, seen, present)


def _is_relevant(
    row: JobRow, latest_attempt: AttemptRow | None, seen: Observation, asked: datetime | None
) -> bool:
    """Whether the observation changes anything."""
    if asked is not None and row.batch_since is not None and row.batch_since > asked:
        return False
    changed = _has_news(row, seen) or _is_first_running(latest_attempt, seen)
    return changed or bool(_decide_changes(row, latest_attempt, seen, utc_now()))


def _has_news(row: JobRow, seen: Observation) -> bool:
    if row.batch_status != seen.status or row.batch_reason != _reason_text(seen):
        return True
    if seen.status is BatchStatus.MISSING:
        return False
    grid = seen.ref.grid_job_id[:512]
    return row.cluster is None or bool(grid and grid != row.grid_job_id)


def _is_first_running(latest_attempt: AttemptRow | None, seen: Observation) -> bool:
    running = seen.status is BatchStatus.RUNNING
    return (
        running
        and latest_attempt is not None
        and latest_attempt.ended is None
        and not latest_attempt.seen_running
    )


def _reason_text(seen: Observation) -> str:
    return seen.reason[:8192].replace("\0", "\N{REPLACEMENT CHARACTER}")


def _exit_text(seen: Observation) -> str:
    if seen.exit_signal is not None:
        return f"signal={seen.exit_signal}"
    return f"code={seen.exit_code}" if seen.exit_code is not None else ""


def _stored_observation(row: JobRow) -> Observation:
    """Return the scheduler's latest observation as it was stored."""
    kind, _, number = row.batch_exit.partition("=")
    return Observation(
        job_id=row.id,
        status=BatchStatus(row.batch_status),
        ref=ref_of(row) or CondorRef(schedd="", cluster=0, proc=0),
        reason=row.batch_reason,
        exit_code=int(number) if kind == "code" else None,
        exit_signal=int(number) if kind == "signal" else None,
    )
