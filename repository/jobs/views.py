"""Converts rows to value objects of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from repository.db.models import AttemptRow, EventRow, JobRow, OutputRow, SubmissionRow
from repository.db.views import columns_of, view_of
from vmjobs.errors import Unavailable
from vmjobs.model import (
    Actor,
    CondorRef,
    Job,
    JobAction,
    JobSpec,
    Output,
    Reason,
    ReasonCode,
    RejectedEntry,
)

#: Called with an array's id.
PublishArray = Callable[[str], None]
#: Called with an action and ids of jobs.
PublishJobs = Callable[[JobAction, Sequence[str]], None]


class SubmissionResult(NamedTuple):
    """The result of a submission. ``created`` is false if the key was used before."""

    array: str
    jobs: list[Job]
    created: bool


def job_views(session: Session, rows: Sequence[JobRow]) -> list[Job]:
    """Convert jobs for clients, with a constant number of queries."""
    attempts = latest_attempts(session, rows)
    outputs: dict[str, list[Output]] = {}
    if attempts:
        found = select(OutputRow).where(OutputRow.attempt_id.in_(attempts)).order_by(OutputRow.path)
        for item in session.scalars(found):
            outputs.setdefault(item.attempt_id, []).append(view_of(Output, item))
    # Each submission is fetched once: its script may be large.
    arrays = select(SubmissionRow).where(SubmissionRow.id.in_({row.array_id for row in rows}))
    parents = {parent.id: parent for parent in session.scalars(arrays)}
    specs = {parent.id: submitted_spec(parent) for parent in parents.values()}
    jobs = []
    for row in rows:
        attempt, parent = attempts.get(row.attempt), parents[row.array_id]
        of_attempt = columns_of(Job, attempt) if attempt else {}
        of_job: dict[str, Any] = {
            **columns_of(Job, row),
            "array": parent.id,
            "count": parent.count,
            "spec": specs[parent.id],
            "image_digest": parent.image_digest,
            "reason": reason_of(row),
            "outputs": outputs.get(row.attempt, ()),
            "condor": ref_of(row),
        }
        jobs.append(Job.model_validate(of_attempt | of_job))
    return jobs


def latest_attempts(session: Session, rows: Collection[JobRow]) -> dict[str, AttemptRow]:
    """Return the latest attempts of these jobs, by id."""
    ids = [row.attempt for row in rows if row.attempt]
    query = select(AttemptRow).where(AttemptRow.id.in_(ids))
    return {attempt.id: attempt for attempt in session.scalars(query)} if ids else {}


def spec_of(row: JobRow) -> JobSpec:
    """Return the job's spec.

    Raises Unavailable if the stored spec is invalid: the database is damaged or not ours.
    """
    return submitted_spec(row.submission)


def submitted_spec(parent: SubmissionRow) -> JobSpec:
    """Return the spec of a submission.  Raises as :func:`spec_of`."""
    try:
        return JobSpec.model_validate(parent.spec)
    except ValidationError as error:
        text = f"the stored spec of submission {parent.id} is unreadable"
        raise Unavailable("database", text) from error


def reason_of(row: JobRow | EventRow) -> Reason:
    """Convert a stored reason."""
    return Reason(
        code=ReasonCode(row.reason_code), message=row.reason_message, actor=Actor(row.reason_actor)
    )


def rejected_of(attempt: AttemptRow | None) -> tuple[RejectedEntry, ...]:
    """Return the outputs of the attempt that were rejected."""
    found = attempt.rejected if attempt else ()
    return tuple(RejectedEntry.model_validate(item) for item in found)


def ref_of(row: JobRow) -> CondorRef | None:
    """Return the job's HTCondor id, if it has one."""
    if row.cluster is None or row.proc is None:
        return None
    return view_of(CondorRef, row, schedd=row.schedd or "")
