"""Selects the jobs of a request, by job id, array id or state."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from repository.db.ids import full_id, is_id
from repository.db.models import JobRow, SubmissionRow
from repository.jobs.transitions import job_not_found
from vmjobs.errors import Fault, InvalidRequest
from vmjobs.job_sets import MAX_SELECTED_JOBS, JobSelection, JobStatus
from vmjobs.model import JobState


def select_jobs(session: Session, selection: JobSelection, owner: str | None) -> list[str]:
    """Return the ids of the jobs, locked in id order until the (write) transaction ends.

    owner: of the jobs; ``None``: any.

    Raises:
        NotFound: there is no job or array with an id, or it is another owner's.
        AmbiguousId: several ids begin with one of them.
        InvalidRequest: more than ``MAX_SELECTED_JOBS`` jobs.
    """
    query = select(JobRow.id).order_by(JobRow.id)
    if owner is not None:
        query = query.where(JobRow.owner == owner)
    if selection.jobs:
        jobs, arrays = _resolve_ids(session, selection.jobs, owner)
        query = query.where(or_(JobRow.id.in_(jobs), JobRow.array_id.in_(arrays)))
    if selection.state:
        query = query.where(JobRow.state.in_([state.value for state in selection.state]))
    ids = list(session.scalars(query.limit(MAX_SELECTED_JOBS + 1).with_for_update(of=JobRow)))
    if len(ids) > MAX_SELECTED_JOBS:
        message = f"these are more than {MAX_SELECTED_JOBS} jobs: name some of them, or an array"
        raise InvalidRequest(message, faults=[Fault("", "too_many", message)])
    return ids


def _resolve_ids(
    session: Session, names: Iterable[str], owner: str | None
) -> tuple[set[str], set[str]]:
    """Resolve ids, or prefixes of ids, to ids of jobs and ids of arrays."""
    left, found = set(names), []
    for table in (JobRow, SubmissionRow):
        whose = [table.owner == owner] if owner is not None else []
        full = {name: full_id(session, table.id, name, *whose) for name in left}
        ids = [text for text in full.values() if is_id(text)]
        known = set(session.scalars(select(table.id).where(table.id.in_(ids), *whose)))
        left = {name for name, text in full.items() if text not in known}
        found.append(known)
    if left:
        raise job_not_found(min(left))
    return found[0], found[1]


def load_states(session: Session, ids: list[str]) -> list[JobStatus]:
    """Return the present states of these jobs, the newest first."""
    query = select(JobRow.id, JobRow.array_id, JobRow.index, JobRow.state).where(JobRow.id.in_(ids))
    return [
        JobStatus(id=job, array=array, index=number, state=JobState(state))
        for job, array, number, state in session.execute(query.order_by(JobRow.id.desc()))
    ]
