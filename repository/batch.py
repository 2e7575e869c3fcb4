"""What the worker does: hand jobs to the scheduler, and take in what the scheduler says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Select, and_, or_, select
from sqlalchemy.orm import Session

from repository.attempts import ending_of, settle
from repository.core import Core
from repository.decide import GONE, Facts, Step, decide
from repository.images.access import manifest_of, parsed
from repository.models import AttemptRow, JobRow, SubmissionRow
from repository.transitions import explain, locked, move, record, touch
from repository.validation import narrowed
from repository.views import ref_of, spec_of
from vmjobs.errors import NotFound
from vmjobs.model import CondorRef, HypervisorKind, JobSpec, JobState, ReasonCode, reason
from vmjobs.model import now as utc_now
from vmjobs.ports import BatchStatus, Observation

_GONE = [status.value for status in GONE]
_FINAL = [state.value for state in JobState if state.final]
_CANCELED = [JobState.CANCELING.value, JobState.CANCELED.value]
PAGE = 1000
#: Jobs changed in one transaction: enough to share a commit, few enough to let others in.
AT_ONCE = 50


@dataclass(frozen=True)
class Ready:
    """A job that the scheduler is to get. kinds: what may run it; none: that is not known.

    architecture: of its image's machine code; "": that is not known.
    """

    id: str
    array: str
    index: int
    owner: str
    spec: JobSpec
    kinds: tuple[HypervisorKind, ...] = ()
    architecture: str = ""


@dataclass(frozen=True)
class Leftover:
    """A job to take back from the scheduler. ``ref`` is missing where it may never have got there.

    why: in words that the scheduler keeps.
    """

    id: str
    array: str
    ref: CondorRef | None
    why: str


def _why(state: JobState) -> str:
    return "canceled" if state.value in _CANCELED else f"the job is {state} already"


class Batch(Core):
    """The worker's part of the repository."""

    # -- to the scheduler

    def begin_dispatch(self, array: str) -> list[Ready]:
        """Mark the array's jobs that no scheduler has yet, and return them.

        From now on canceling one of them means asking the scheduler too.
        Raises NotFound: the submission was not committed (yet).
        """
        with self.database.write() as session:
            if session.get(SubmissionRow, array) is None:
                raise NotFound(f"there is no array {array[:64]}")
            rows = session.scalars(_waiting(array).with_for_update(of=JobRow)).all()
            if not rows:
                return []
            present = utc_now()
            # What runs is the digest; it is also what nodes say they have (Rank).
            spec = spec_of(rows[0]).model_copy(update={"image": rows[0].submission.image_digest})
            kinds, architecture = _needs(session, spec)
            for row in rows:
                row.dispatched = present
            ready = [
                Ready(row.id, row.array_id, row.index, row.owner, spec, kinds, architecture)
                for row in rows
            ]
        return sorted(ready, key=lambda job: job.index)

    def record_condor(self, refs: Mapping[str, CondorRef]) -> list[Leftover]:
        """Note where jobs are now; those that nobody wants any more come back, to be removed."""
        unwanted = []
        with self.database.write() as session:
            for job_id in sorted(refs):
                row = locked(session, job_id)
                self._place(session, row, refs[job_id])
                state = JobState(row.state)
                if state.final or state is JobState.CANCELING:
                    unwanted.append(Leftover(row.id, row.array_id, refs[job_id], _why(state)))
        return unwanted

    def note_unavailable(self, array: str, message: str) -> None:
        """Say on the array's waiting jobs, once, why they wait; their history stays as it is."""
        with self.database.write() as session:
            for row in session.scalars(
                _waiting(array)
                .where(JobRow.reason_code != ReasonCode.SCHEDULER_UNAVAILABLE.value)
                .with_for_update(of=JobRow)
            ):
                explain(row, reason(ReasonCode.SCHEDULER_UNAVAILABLE, message), utc_now())

    def refuse(self, array: str, message: str) -> None:
        """The array's waiting jobs cannot be described to the scheduler: they have failed."""
        with self.database.write() as session:
            for row in session.scalars(_waiting(array).with_for_update(of=JobRow)):
                move(session, row, JobState.FAILED, reason(ReasonCode.INTERNAL, message))
                settle(row)

    # -- what there is to do

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

    def at_scheduler(self, after: str = "") -> list[str]:
        """Ids of at most 1,000 non-final jobs that have a place at the scheduler, past ``after``."""
        with self.database.read() as session:
            return list(
                session.scalars(
                    select(JobRow.id)
                    .where(
                        JobRow.settled.is_(False),
                        JobRow.state.not_in(_FINAL),
                        JobRow.cluster.is_not(None),
                        JobRow.id > after,
                    )
                    .order_by(JobRow.id)
                    .limit(PAGE)
                )
            )

    def undispatched(self, age: timedelta) -> list[str]:
        """Arrays with jobs that were queued longer than ``age`` ago and are at no scheduler."""
        with self.database.read() as session:
            return list(
                session.scalars(
                    select(JobRow.array_id)
                    .where(
                        JobRow.state == JobState.QUEUED.value,
                        JobRow.cluster.is_(None),
                        JobRow.attempt == "",
                        JobRow.created < utc_now() - age,
                    )
                    .distinct()
                    .limit(PAGE)
                )
            )

    def leftover(self, job_id: str) -> Leftover | None:
        """The job as something to take back; ``None`` where nothing is to be done.

        Raises NotFound.
        """
        with self.database.read() as session:
            row = session.get(JobRow, job_id)
            if row is None:
                raise NotFound(f"there is no job {job_id[:64]}")
            state = JobState(row.state)
            if row.settled or not (state.final or state is JobState.CANCELING):
                return None
            if row.batch_status in _GONE:
                return None
            return Leftover(row.id, row.array_id, ref_of(row), _why(state))

    def leftovers(self, canceled: timedelta, ended: timedelta) -> list[str]:
        """Jobs that may still be at the scheduler so long after they were canceled, or had ended."""
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
                    .limit(PAGE)
                )
            )

    def finished_arrays(self) -> list[str]:
        """Arrays whose jobs are all settled and whose spool the scheduler side still keeps."""
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
        """The array's spool is gone."""
        with self.database.write() as session:
            row = session.get(SubmissionRow, array)
            if row is not None:
                row.forgotten = True

    # -- from the scheduler

    def observe(self, seen: Sequence[Observation], asked: datetime | None = None) -> None:
        """Take in what the scheduler says and move the jobs that it moves.

        asked: when the question was put, for an answer that may be older than what the event
        logs have told since.  An observation of an unknown job is ignored.
        """
        words = sorted(seen, key=lambda item: item.job_id)
        for start in range(0, len(words), PAGE):
            news = self._news_of(words[start : start + PAGE], asked)
            for first in range(0, len(news), AT_ONCE):
                with self.database.write() as session:
                    for item in news[first : first + AT_ONCE]:
                        self._apply(session, locked(session, item.job_id), item, asked)

    def _news_of(self, seen: Sequence[Observation], asked: datetime | None) -> list[Observation]:
        """Those that change something; most change nothing, and need no lock."""
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
        """Decide again about jobs for which a grace may have ended meanwhile."""
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

    def _apply(self, session: Session, row: JobRow, seen: Observation, asked: datetime | None) -> None:
        tried = session.get(AttemptRow, row.attempt) if row.attempt else None
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
        """Note a job's place at the scheduler; the first place stays, its grid id may change."""
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


def _needs(session: Session, spec: JobSpec) -> tuple[tuple[HypervisorKind, ...], str]:
    """What may run jobs of this specification, whose image is a digest; and on what architecture."""
    data = manifest_of(session, spec.image)
    if not data:
        return (), ""
    manifest = parsed(data, spec.image)
    return narrowed(spec, manifest.hypervisors), manifest.architecture


def _waiting(array: str) -> Select[JobRow]:
    """The array's queued jobs without a place at the scheduler, in the order of all locks."""
    waiting = (JobRow.state == JobState.QUEUED.value, JobRow.cluster.is_(None), JobRow.attempt == "")
    return select(JobRow).where(JobRow.array_id == array, *waiting).order_by(JobRow.id)


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
    """The scheduler's last word as it was stored."""
    kind, _, number = row.batch_exit.partition("=")
    return Observation(
        job_id=row.id,
        status=BatchStatus(row.batch_status),
        ref=ref_of(row) or CondorRef(schedd="", cluster=0, proc=0),
        reason=row.batch_reason,
        exit_code=int(number) if kind == "code" else None,
        exit_signal=int(number) if kind == "signal" else None,
    )
