"""Synchronizes jobs with HTCondor: jobs to submit or remove, and observed job states."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import and_, func, or_, select, update
from sqlalchemy.orm import Session

from repository.attempts import ending_of, settle
from repository.core import Core
from repository.decide import GONE, Facts, Step, decide
from repository.images.access import manifest_of
from repository.models import AttemptRow, JobRow, SubmissionRow
from repository.transitions import explain, move, record, touch
from repository.views import ref_of
from repository.waiting import WAITING, in_turn, needs, waiting_jobs
from vmjobs.errors import NotFound, Unavailable
from vmjobs.job_sets import MAX_SELECTED
from vmjobs.model import CondorRef, JobState, ReasonCode, reason
from vmjobs.model import now as utc_now
from vmjobs.ports import BatchJob, BatchStatus, Observation

_GONE = [status.value for status in GONE]
_FINAL = [state.value for state in JobState if state.final]
_CANCELED = [JobState.CANCELING.value, JobState.CANCELED.value]
PAGE = 1000
#: Jobs changed in one transaction: enough to share a commit, few enough not to delay others.
AT_ONCE = 50


@dataclass(frozen=True)
class Leftover:
    """A job to remove from the scheduler. ``ref`` is None if its submission is not confirmed.

    why: the reason that HTCondor records.
    """

    id: str
    ref: CondorRef | None
    why: str


def _why(state: JobState) -> str:
    return "canceled" if state.value in _CANCELED else f"the job is {state} already"


class Batch(Core):
    """The part of the repository that the worker calls."""

    # -- to the scheduler

    def begin_dispatch(self, limit: int, skip: Collection[str] = ()) -> list[BatchJob]:
        """Mark pending jobs as dispatched and return them without tokens: whole arrays, in turn.

        Owners take turns. limit: jobs at most, but the first array is always taken. skip: arrays that
        have to wait. From now on, canceling one of these jobs involves the scheduler.
        """
        counts = (
            select(JobRow.array_id, JobRow.owner, func.count())
            .where(*WAITING, JobRow.array_id.not_in(skip))
            .group_by(JobRow.array_id, JobRow.owner)
            .order_by(JobRow.array_id)
        )
        with self.database.write() as session:
            chosen = in_turn([(row[0], row[1], row[2]) for row in session.execute(counts)], limit)
            rows = (
                session.scalars(waiting_jobs(*chosen).with_for_update(of=JobRow)).all()
                if chosen
                else []
            )
            mark = update(JobRow).where(JobRow.id.in_([row.id for row in rows]))
            session.execute(mark.values(dispatched=utc_now()))
            parents = session.scalars(select(SubmissionRow).where(SubmissionRow.id.in_(chosen))).all()
            images = {parent.image_digest for parent in parents}
            manifests = {image: manifest_of(session, image) for image in images}
            asked = {parent.id: needs(parent, manifests[parent.image_digest]) for parent in parents}
            ready = [
                BatchJob(row.id, row.array_id, row.index, row.owner, **asked[row.array_id])
                for row in rows
            ]
        turn = {array: number for number, array in enumerate(chosen)}
        return sorted(ready, key=lambda job: (turn[job.array], job.index))

    def record_condor(self, refs: Mapping[str, CondorRef]) -> list[Leftover]:
        """Store the jobs' HTCondor ids; return the jobs that ended meanwhile and must be removed."""
        unwanted = []
        for session, row, _ in self._locked(sorted(refs)):
            self._place(session, row, refs[row.id])
            state = JobState(row.state)
            if state.final or state is JobState.CANCELING:
                unwanted.append(Leftover(row.id, refs[row.id], _why(state)))
        return unwanted

    def _locked(self, ids: Sequence[str]) -> Iterator[tuple[Session, JobRow, AttemptRow | None]]:
        """Yield each job, locked, with its session and latest attempt; jobs share transactions."""
        for first in range(0, len(ids), AT_ONCE):
            chosen = JobRow.id.in_(ids[first : first + AT_ONCE])
            with self.database.write() as session:
                query = select(JobRow).where(chosen).order_by(JobRow.id).with_for_update(of=JobRow)
                rows = session.scalars(query).all()
                latest = select(AttemptRow).where(
                    AttemptRow.id.in_([r.attempt for r in rows if r.attempt])
                )
                attempts = {attempt.id: attempt for attempt in session.scalars(latest)}
                for row in rows:
                    yield session, row, attempts.get(row.attempt)

    def note_unavailable(self, arrays: Collection[str], message: str) -> None:
        """Set the reason why waiting jobs of these arrays wait, once, without a line of history."""
        with self.database.write() as session:
            for row in session.scalars(
                waiting_jobs(*arrays)
                .where(JobRow.reason_code != ReasonCode.SCHEDULER_UNAVAILABLE.value)
                .with_for_update(of=JobRow)
            ):
                explain(row, reason(ReasonCode.SCHEDULER_UNAVAILABLE, message), utc_now())

    def refuse(self, array: str, message: str) -> None:
        """Fail the array's waiting jobs, because the scheduler side cannot submit them."""
        with self.database.write() as session:
            for row in session.scalars(waiting_jobs(array).with_for_update(of=JobRow)):
                move(session, row, JobState.FAILED, reason(ReasonCode.INTERNAL, message))
                settle(row)

    # -- work lists

    def active_arrays(self) -> list[str]:
        """Arrays with jobs at the scheduler."""
        with self.database.read() as session:
            return list(
                session.scalars(
                    select(JobRow.array_id)
                    .where(JobRow.settled.is_(False), JobRow.dispatched.is_not(None))
                    .distinct()
                )
            )

    def at_scheduler(self) -> list[str]:
        """Ids of non-final jobs that have a place at the scheduler."""
        with self.database.read() as session:
            return list(
                session.scalars(
                    select(JobRow.id).where(
                        JobRow.settled.is_(False),
                        JobRow.state.not_in(_FINAL),
                        JobRow.cluster.is_not(None),
                    )
                )
            )

    def require_array(self, array: str) -> None:
        """Raises NotFound: the submission was not committed (yet)."""
        with self.database.read() as session:
            if session.get(SubmissionRow, array) is None:
                raise NotFound(f"there is no array {array[:64]}")

    def waits(self, skip: Collection[str] = ()) -> bool:
        """Whether there are pending jobs outside of the arrays in ``skip``."""
        query = select(JobRow.id).where(*WAITING, JobRow.array_id.not_in(skip)).limit(1)
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

    def leftover(self, ids: Sequence[str]) -> list[Leftover]:
        """Return those of these jobs that have to be removed from the scheduler."""
        query = select(JobRow).where(
            JobRow.id.in_(ids),
            JobRow.settled.is_(False),
            JobRow.state.in_([*_FINAL, JobState.CANCELING.value]),
            JobRow.batch_status.not_in(_GONE),
        )
        with self.database.read() as session:
            return [
                Leftover(row.id, ref_of(row), _why(JobState(row.state)))
                for row in session.scalars(query)
            ]

    def leftovers(self, canceled: timedelta, ended: timedelta) -> list[str]:
        """Return jobs that may be at the scheduler so long after they were canceled or ended."""
        now = utc_now()
        with self.database.read() as session:
            return list(
                session.scalars(
                    select(JobRow.id)
                    .where(
                        JobRow.settled.is_(False),
                        JobRow.batch_status.not_in(_GONE),
                        or_(
                            JobRow.state.in_(_CANCELED) & (JobRow.updated < now - canceled),
                            JobRow.state.in_(_FINAL) & (JobRow.updated < now - ended),
                        ),
                    )
                    .order_by(JobRow.id)
                    .limit(MAX_SELECTED)
                )
            )

    def finished_arrays(self) -> list[str]:
        """Arrays whose jobs are all settled and whose spool directory still exists."""
        open_jobs = (
            select(JobRow.id)
            .where(JobRow.array_id == SubmissionRow.id, JobRow.settled.is_(False))
            .exists()
        )
        with self.database.read() as session:
            return list(
                session.scalars(
                    select(SubmissionRow.id)
                    .where(SubmissionRow.forgotten.is_(False), ~open_jobs)
                    .limit(PAGE)
                )
            )

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
        words = sorted(seen, key=lambda item: item.job_id)
        for start in range(0, len(words), PAGE):
            news = {item.job_id: item for item in self._news_of(words[start : start + PAGE], asked)}
            for session, row, tried in self._locked(list(news)):
                self._apply(session, row, tried, news[row.id], asked)

    def _news_of(self, seen: Sequence[Observation], asked: datetime | None) -> list[Observation]:
        """Return the observations that change something; most change nothing, and need no lock."""
        with self.database.read() as session:
            query = select(JobRow).where(JobRow.id.in_([item.job_id for item in seen]))
            rows = {row.id: row for row in session.scalars(query)}
            names = [row.attempt for row in rows.values() if row.attempt]
            attempts = select(AttemptRow).where(AttemptRow.id.in_(names))
            tried = {item.id: item for item in session.scalars(attempts)}
            return [
                item
                for item in seen
                if (row := rows.get(item.job_id)) is not None
                and _matters(row, tried.get(row.attempt), item, asked)
            ]

    def observe_waiting(self) -> None:
        """Decide again about jobs whose grace period may have ended."""
        waiting = or_(
            JobRow.batch_status.in_(_GONE),
            and_(
                JobRow.batch_status == BatchStatus.IDLE.value,
                JobRow.state != JobState.QUEUED.value,
            ),
        )
        query = select(JobRow).where(JobRow.settled.is_(False), JobRow.state.not_in(_FINAL), waiting)
        with self.database.read() as session:
            again = [_stored(row) for row in session.scalars(query)]
        self.observe(again)

    def _apply(
        self,
        session: Session,
        row: JobRow,
        tried: AttemptRow | None,
        seen: Observation,
        asked: datetime | None,
    ) -> None:
        if not _matters(row, tried, seen, asked):
            return
        present = utc_now()
        if seen.status is not BatchStatus.MISSING:
            self._place(session, row, seen.ref)
        if row.batch_status != seen.status:
            row.batch_status, row.batch_since = seen.status.value, present
        row.batch_reason = _text(seen)
        row.batch_exit = _exit_text(seen)
        if tried is not None and _first_running(tried, seen):
            tried.seen_running = True
        for step in _decide(row, tried, seen, present):
            move(session, row, step.state, step.reason)
        settle(row)

    def _place(self, session: Session, row: JobRow, ref: CondorRef) -> None:
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


def _decide(row: JobRow, tried: AttemptRow | None, seen: Observation, present: datetime) -> list[Step]:
    same = row.batch_status == seen.status and row.batch_since is not None
    facts = Facts(
        state=JobState(row.state),
        code=ReasonCode(row.reason_code),
        since=row.batch_since if same and row.batch_since else present,
        claimed=tried is not None,
        ended=tried is not None and tried.ended is not None,
        ending=ending_of(tried) if tried else None,
        heard=tried.heard if tried else None,
        seen_running=tried is not None and tried.seen_running,
    )
    return decide(facts, seen, present)


def _matters(row: JobRow, tried: AttemptRow | None, seen: Observation, asked: datetime | None) -> bool:
    """Whether the observation changes anything."""
    if asked is not None and row.batch_since is not None and row.batch_since > asked:
        return False
    changed = _news(row, seen) or _first_running(tried, seen)
    return changed or bool(_decide(row, tried, seen, utc_now()))


def _news(row: JobRow, seen: Observation) -> bool:
    if row.batch_status != seen.status or row.batch_reason != _text(seen):
        return True
    if seen.status is BatchStatus.MISSING:
        return False
    grid = seen.ref.grid_job_id[:512]
    return row.cluster is None or bool(grid and grid != row.grid_job_id)


def _first_running(tried: AttemptRow | None, seen: Observation) -> bool:
    running = seen.status is BatchStatus.RUNNING
    return running and tried is not None and tried.ended is None and not tried.seen_running


def _text(seen: Observation) -> str:
    return seen.reason[:8192].replace("\0", "\N{REPLACEMENT CHARACTER}")


def _exit_text(seen: Observation) -> str:
    if seen.exit_signal is not None:
        return f"signal={seen.exit_signal}"
    return f"code={seen.exit_code}" if seen.exit_code is not None else ""


def _stored(row: JobRow) -> Observation:
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
