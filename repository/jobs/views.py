"""Converts rows to value objects of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from repository.db.models import AttemptRow, EventRow, JobRow, OutputRow, SubmissionRow
from vmjobs.errors import Unavailable
from vmjobs.model import (
    Actor,
    CondorRef,
    ExitStatus,
    HypervisorKind,
    Job,
    JobAction,
    JobEvent,
    JobSpec,
    JobState,
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
            outputs.setdefault(item.attempt_id, []).append(output_of(item))
    # Each submission is fetched once: its script may be large.
    arrays = select(SubmissionRow).where(SubmissionRow.id.in_({row.array_id for row in rows}))
    parents = {parent.id: parent for parent in session.scalars(arrays)}
    specs = {parent.id: submitted_spec(parent) for parent in parents.values()}
    return [
        _view(
            row,
            parents[row.array_id],
            specs[row.array_id],
            attempts.get(row.attempt),
            tuple(outputs.get(row.attempt, ())),
        )
        for row in rows
    ]


def latest_attempts(session: Session, rows: Collection[JobRow]) -> dict[str, AttemptRow]:
    """Return the latest attempts of these jobs, by id."""
    ids = [row.attempt for row in rows if row.attempt]
    query = select(AttemptRow).where(AttemptRow.id.in_(ids))
    return {attempt.id: attempt for attempt in session.scalars(query)} if ids else {}


def _view(
    row: JobRow,
    parent: SubmissionRow,
    spec: JobSpec,
    attempt: AttemptRow | None,
    outputs: tuple[Output, ...],
) -> Job:
    kind = attempt.hypervisor if attempt else None
    return Job(
        id=row.id,
        array=row.array_id,
        index=row.index,
        count=parent.count,
        owner=row.owner,
        spec=spec,
        image_digest=parent.image_digest,
        state=JobState(row.state),
        reason=reason_of(row),
        created=row.created,
        updated=row.updated,
        attempts=row.attempts,
        node=attempt.node if attempt else "",
        hypervisor=HypervisorKind(kind) if kind else None,
        exit=ExitStatus.model_validate(attempt.exit) if attempt and attempt.exit else None,
        seconds=attempt.seconds if attempt else {},
        bytes=attempt.bytes if attempt else {},
        cpu_seconds=attempt.cpu_seconds if attempt else 0.0,
        outputs=outputs,
        rejected=rejected_of(attempt),
        condor=ref_of(row),
    )


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


def output_of(row: OutputRow) -> Output:
    """Convert a delivered file."""
    return Output(path=row.path, size=row.size, digest=row.digest)


def event_of(row: EventRow) -> JobEvent:
    """Convert a line of history."""
    return JobEvent(
        seq=row.seq,
        time=row.time,
        state=JobState(row.state),
        reason=reason_of(row),
        attempt=row.attempt,
    )


def ref_of(row: JobRow) -> CondorRef | None:
    """Return the job's HTCondor id, if it has one."""
    if row.cluster is None or row.proc is None:
        return None
    return CondorRef(
        schedd=row.schedd or "", cluster=row.cluster, proc=row.proc, grid_job_id=row.grid_job_id
    )
