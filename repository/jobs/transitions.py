"""Changes of a stored job's state, in one place, and the row locks that make them safe."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import insert, update
from sqlalchemy.orm import Session

from repository.db.ids import is_id
from repository.db.models import EventRow, JobRow
from repository.images.checkpoints import delete_checkpoint
from vmjobs.errors import NotFound
from vmjobs.model import TRANSITIONS, JobState, Reason, advance
from vmjobs.model import now as utc_now


def lock_job(session: Session, job_id: str) -> JobRow:
    """Return the job's row, locked until the (write) transaction ends.  Raises NotFound."""
    found = session.get(JobRow, job_id, with_for_update=True) if is_id(job_id) else None
    if found is None:
        raise job_not_found(job_id)
    return found


def job_not_found(job_id: str) -> NotFound:
    """Return the error for a job that does not exist, or that the caller may not see."""
    return NotFound(f"there is no job {job_id[:64]}")


def move(
    session: Session, row: JobRow, new: JobState, why: Reason, *, at: datetime | None = None
) -> None:
    """Change the state of a locked job and append the event.

    ``at``: when it happened, by another host's clock; clamped between the last event and now.
    Raises Conflict: TRANSITIONS has no such step.
    """
    row.state = advance(JobState(row.state), new, job_id=row.id).value
    if new.final and row.attempts:
        delete_checkpoint(session, row.id)
    record(session, row, why, at=at)


def move_all(session: Session, ids: Sequence[str], new: JobState, why: Reason) -> list[str]:
    """Change the state of those locked jobs that may enter it, all at once; return their ids.

    For a final state, the jobs must never have had a checkpoint, as none is deleted here.
    """
    may = [state.value for state, following in TRANSITIONS.items() if new in following]
    reason_columns = {
        "state": new.value,
        "reason_code": why.code.value,
        "reason_message": why.message,
        "reason_actor": why.actor.value,
    }
    present = utc_now()
    change = update(JobRow).where(JobRow.id.in_(ids), JobRow.state.in_(may))
    change = change.values(
        **reason_columns,
        updated=present,
        version=JobRow.version + 1,
        events_count=JobRow.events_count + 1,
    )
    statement = change.returning(JobRow.id, JobRow.events_count, JobRow.attempt)
    moved = session.execute(statement, execution_options={"synchronize_session": False}).all()
    if moved:
        events = [
            {"job_id": job, "seq": seq, "time": present, "attempt": attempt, **reason_columns}
            for job, seq, attempt in moved
        ]
        session.execute(insert(EventRow), events)
    return [row.id for row in moved]


def record(session: Session, row: JobRow, why: Reason, *, at: datetime | None = None) -> None:
    """Append an event to a locked job's history, in its present state."""
    present = utc_now()
    moment = present if at is None else max(row.updated, min(at, present))
    set_reason(row, why, moment)
    row.events_count += 1
    session.add(new_event(row, moment))


def new_event(row: JobRow, moment: datetime) -> EventRow:
    """Return an event with the job's present state and reason."""
    return EventRow(
        job_id=row.id,
        seq=row.events_count,
        time=moment,
        state=row.state,
        reason_code=row.reason_code,
        reason_message=row.reason_message,
        reason_actor=row.reason_actor,
        attempt=row.attempt,
    )


def set_reason(row: JobRow, why: Reason, moment: datetime) -> None:
    """Change the reason of a locked job without a line in its history."""
    row.reason_code, row.reason_actor = why.code.value, why.actor.value
    # PostgreSQL refuses NULs, which a guest's message may contain.
    row.reason_message = why.message.replace("\0", "\N{REPLACEMENT CHARACTER}")
    touch(row, moment)


def touch(row: JobRow, moment: datetime) -> None:
    """Increment the version of a locked job, so that clients see a change."""
    row.updated = max(row.updated, moment)
    row.version += 1
