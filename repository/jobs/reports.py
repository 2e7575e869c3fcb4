"""Applies agents' reports to locked jobs, as far as the job's state and the scheduler allow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from sqlalchemy.orm import Session

from repository.db.models import AttemptRow, JobRow
from repository.images.checkpoints import record_resume_failure
from repository.jobs.state_policy import ABSENT_STATUSES, StateChange
from repository.jobs.transitions import move, touch
from vmjobs.batch import BatchStatus
from vmjobs.model import ON_NODE_STATES, Actor, JobState, Reason, ReasonCode, Report, reason
from vmjobs.model import now as utc_now

MAX_PHASES: Final = 32
#: States that an agent may report.
REPORTABLE: Final = ON_NODE_STATES | {
    JobState.COMPLETED,
    JobState.FAILED,
    JobState.CANCELING,
    JobState.CANCELED,
    JobState.PREEMPTED,
}
#: States that a stale observation of the scheduler may give to a job whose agent still works.
STALE_STATES: Final = frozenset({JobState.QUEUED, JobState.HELD, JobState.PREEMPTED})
_RUN_STATES: Final = (JobState.STAGING, JobState.BOOTING, JobState.RUNNING, JobState.COLLECTING)


def store_report(row: JobRow, latest_attempt: AttemptRow, report: Report) -> None:
    """Store the report's data besides the state, even if the state itself is not applied."""
    latest_attempt.heard = utc_now()
    if report.hypervisor is not None:
        latest_attempt.hypervisor = report.hypervisor.value
    if report.exit is not None:
        latest_attempt.exit = report.exit.model_dump(mode="json")
    if report.seconds:
        latest_attempt.seconds = {**latest_attempt.seconds, **_valid_seconds(report.seconds)}
    if report.bytes:
        latest_attempt.bytes = {**latest_attempt.bytes, **report.bytes}
    latest_attempt.cpu_seconds = max(latest_attempt.cpu_seconds, report.cpu_seconds)
    if report.rejected:
        latest_attempt.rejected = [item.model_dump(mode="json") for item in report.rejected]
    touch(row, latest_attempt.heard)


def _valid_seconds(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the valid phase times, at most ``MAX_PHASES``; JSON has no NaN."""
    fit = {k[:64]: v for k, v in seconds.items() if math.isfinite(v) and v >= 0 and "\0" not in k}
    return dict(list(fit.items())[:MAX_PHASES])


def apply_state(session: Session, row: JobRow, latest_attempt: AttemptRow, report: Report) -> None:
    """Move the job to the reported state, as far as TRANSITIONS allows."""
    at = report.time if report.time.tzinfo else report.time.replace(tzinfo=UTC)
    if row.state == JobState.CANCELING:
        if _ends_canceling(report):  # the scheduler decides whether the job ended or was canceled
            why = report.reason.model_dump(mode="json")
            latest_attempt.ending = {"state": report.state.value, "reason": why}
        return
    if report.reason.code is ReasonCode.NOT_RESUMED and latest_attempt.ended is None:
        record_resume_failure(session, row.id)
    if row.state in STALE_STATES and latest_attempt.reached and latest_attempt.ended is None:
        if report.state is JobState.PREEMPTED:
            return
        if report.state in ON_NODE_STATES or report.state is JobState.COMPLETED:
            _catch_up(session, row, JobState(latest_attempt.reached), at)
    if row.state == report.state:
        return
    if report.state is JobState.CANCELED:
        # The VM is gone; the scheduler decides when the job is over.
        move(session, row, JobState.CANCELING, report.reason, at=at)
        return
    move(session, row, report.state, report.reason, at=at)
    latest_attempt.reached = report.state.value


def ending_of(latest_attempt: AttemptRow) -> StateChange | None:
    """Return how the attempt ended by itself while its job was being canceled, if it did."""
    if latest_attempt.ending is None:
        return None
    return StateChange(
        JobState(latest_attempt.ending["state"]), Reason.model_validate(latest_attempt.ending["reason"])
    )


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
    if reached not in ON_NODE_STATES:
        return
    why = reason(ReasonCode.PROGRESS, "the node is still at work on the job")
    if row.state != JobState.QUEUED:
        move(session, row, JobState.QUEUED, why, at=at)
    target = JobState.RUNNING if reached is JobState.SUSPENDED else reached
    for state in _RUN_STATES[: _RUN_STATES.index(target) + 1]:
        move(session, row, state, why, at=at)
    if reached is JobState.SUSPENDED:
        move(session, row, reached, why, at=at)


def settle_cancel(session: Session, row: JobRow, latest_attempt: AttemptRow) -> None:
    """End a canceled job once both its VM and its batch job are gone."""
    if row.state != JobState.CANCELING:
        return
    ending, completed = ending_of(latest_attempt), row.batch_status == BatchStatus.COMPLETED
    if ending is not None and (completed or row.dispatched is None):
        move(session, row, ending.state, ending.reason)
        return
    if _is_absent(row):
        why = reason(ReasonCode(row.reason_code), "canceled; the virtual machine is gone")
        move(session, row, JobState.CANCELED, why)


def update_settled(row: JobRow) -> None:
    """Update ``settled``: the job is final and the scheduler has nothing of it any more."""
    row.settled = JobState(row.state).final and _is_absent(row)


def _is_absent(row: JobRow) -> bool:
    """Whether the scheduler has nothing of the job."""
    return row.dispatched is None or row.batch_status in ABSENT_STATUSES
