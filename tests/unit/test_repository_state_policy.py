"""The table of what a scheduler's status means for a job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from repository.jobs.state_policy import (
    AGENT_SILENCE,
    CANCEL_GRACE,
    LOST_AFTER,
    REPORT_GRACE,
    RecordedJob,
    StateChange,
    decide,
)
from vmjobs.batch import BatchStatus, Observation
from vmjobs.model import ON_NODE_STATES, TRANSITIONS, CondorRef, JobState, ReasonCode, reason

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
LONG = timedelta(hours=1)
S, B, C = JobState, BatchStatus, ReasonCode


def seen(status: BatchStatus, why: str = "", code: int | None = None) -> Observation:
    return Observation("j", status, CondorRef(schedd="s", cluster=1, proc=0), why, code)


def facts(state: JobState, **changes: object) -> RecordedJob:
    values: dict[str, object] = {"code": C.USER_CANCELED, "since": NOW, **changes}
    return RecordedJob(state=state, **values)  # type: ignore[arg-type]


def path(known: RecordedJob, word: Observation, now: datetime = NOW) -> list[tuple[str, str]]:
    return [(step.state.value, step.reason.code.value) for step in decide(known, word, now)]


#: status: (from QUEUED, from a node, from HELD, from PREEMPTED, from CANCELING); the agent is
#: silent, the status is an hour old, an agent had claimed the job.
EVICTED = [("PREEMPTED", "EVICTED"), ("QUEUED", "EVICTED")]
AGAIN = [("QUEUED", "SCHEDULED")]
RELEASED = [("QUEUED", "RELEASED")]
HELD = [("HELD", "SCHEDULER_HELD")]
REMOVED = [("CANCELING", "SCHEDULER_REMOVED"), ("CANCELED", "SCHEDULER_REMOVED")]
CANCELED = [("CANCELED", "USER_CANCELED")]
LOST = [("FAILED", "SCHEDULER_LOST")]
GUEST_LOST = [("FAILED", "GUEST_LOST")]
TABLE = {
    B.IDLE: ([], EVICTED, RELEASED, AGAIN, []),
    B.RUNNING: ([], [], RELEASED, AGAIN, []),
    B.SUSPENDED: ([], [], RELEASED, AGAIN, []),
    B.HELD: (HELD, HELD, [], AGAIN + HELD, []),
    B.REMOVED: (REMOVED, REMOVED, REMOVED, REMOVED, CANCELED),
    B.COMPLETED: (GUEST_LOST, GUEST_LOST, GUEST_LOST, GUEST_LOST, CANCELED),
    B.MISSING: (LOST, LOST, LOST, LOST, CANCELED),
}
FROM = (S.QUEUED, S.RUNNING, S.HELD, S.PREEMPTED, S.CANCELING)
CELLS = [
    (status, state, expected)
    for status, row in TABLE.items()
    for state, expected in zip(FROM, row, strict=True)
]


@pytest.mark.parametrize(("status", "state", "expected"), CELLS)
def test_table(status: BatchStatus, state: JobState, expected: list[tuple[str, str]]) -> None:
    known = facts(state, since=NOW - LONG, claimed=True, heard=NOW - LONG)
    assert path(known, seen(status, code=7)) == expected


def test_every_path_is_in_the_transition_table() -> None:
    for status, state, claimed in product(B, S, (True, False)):
        at = state
        for step in decide(facts(state, since=NOW - LONG, claimed=claimed), seen(status), NOW):
            assert step.state in TRANSITIONS[at], (status, state, claimed)
            at = step.state
        if state.final:
            assert at is state, (status, claimed)


@pytest.mark.parametrize("state", sorted(ON_NODE_STATES))
def test_idle_is_an_eviction_only_if_it_can_be_believed(state: JobState) -> None:
    # Condor-C: the submit side reports idle for up to a minute after the agent has started.
    fresh = facts(state, claimed=True, heard=NOW - AGENT_SILENCE + timedelta(seconds=1))
    assert path(fresh, seen(B.IDLE)) == []
    silent = facts(state, claimed=True, heard=NOW - AGENT_SILENCE)
    assert path(silent, seen(B.IDLE)) == EVICTED
    known = facts(state, claimed=True, heard=NOW, seen_running=True)
    assert path(known, seen(B.IDLE)) == EVICTED
    ended = facts(state, claimed=True, heard=NOW, ended=True)
    assert path(ended, seen(B.IDLE)) == EVICTED


def test_a_removed_job_is_canceled_at_once_if_no_node_had_it() -> None:
    assert path(facts(S.QUEUED), seen(B.REMOVED)) == REMOVED
    assert path(facts(S.CANCELING), seen(B.MISSING)) == CANCELED


def test_a_removed_job_waits_for_its_node() -> None:
    held_up = facts(S.CANCELING, claimed=True)
    assert path(held_up, seen(B.REMOVED)) == []
    assert path(held_up, seen(B.REMOVED), NOW + CANCEL_GRACE) == CANCELED
    assert path(facts(S.CANCELING, claimed=True, ended=True), seen(B.REMOVED)) == CANCELED
    assert path(facts(S.RUNNING, claimed=True), seen(B.REMOVED)) == REMOVED[:1]


def test_how_a_canceled_job_ended_is_the_schedulers_to_say() -> None:
    done = StateChange(S.COMPLETED, reason(C.SUCCEEDED, "the script succeeded"))
    known = facts(S.CANCELING, claimed=True, ended=True, ending=done)
    assert decide(known, seen(B.COMPLETED), NOW) == [done]
    assert path(known, seen(B.REMOVED)) == CANCELED
    assert path(known, seen(B.RUNNING)) == []


def test_the_final_report_may_come_after_the_scheduler_says_completed() -> None:
    known = facts(S.COLLECTING, claimed=True, heard=NOW)
    assert path(known, seen(B.COMPLETED)) == []
    assert path(known, seen(B.COMPLETED), NOW + REPORT_GRACE - timedelta(seconds=1)) == []
    assert path(known, seen(B.COMPLETED, code=7), NOW + REPORT_GRACE) == GUEST_LOST


def test_exit_code_zero_without_a_report_is_no_success() -> None:
    (step,) = decide(facts(S.RUNNING, claimed=True), seen(B.COMPLETED, code=0), NOW + LONG)
    assert (step.state, step.reason.code) == (S.FAILED, C.NO_EXIT_REPORT)
    assert "ended with code 0 while the job was RUNNING" in step.reason.message


def test_a_batch_job_that_no_agent_took_failed_on_its_node() -> None:
    (step,) = decide(facts(S.QUEUED), seen(B.COMPLETED, code=69), NOW + LONG)
    assert (step.state, step.reason.code) == (S.FAILED, C.NODE_FAILED)


def test_a_job_is_given_up_late_and_never_while_its_agent_speaks() -> None:
    known = facts(S.RUNNING, claimed=True, heard=NOW)
    assert path(known, seen(B.MISSING), NOW + LOST_AFTER - timedelta(seconds=1)) == []
    assert path(known, seen(B.MISSING), NOW + LOST_AFTER) == LOST
    speaking = facts(S.RUNNING, claimed=True, heard=NOW + LOST_AFTER)
    assert path(speaking, seen(B.MISSING), NOW + LOST_AFTER) == []


def test_hold_tells_the_schedulers_reason() -> None:
    (step,) = decide(facts(S.RUNNING, claimed=True), seen(B.HELD, "disk full"), NOW)
    assert step.reason.message == "disk full"


def test_a_job_that_nodes_failed_and_its_scheduler_gave_up_says_what_they_failed_for() -> None:
    known = facts(S.PREEMPTED, code=C.NODE_FAILED, claimed=True, ended=True)
    assert path(known, seen(B.COMPLETED), NOW + LONG) == [("FAILED", "NODE_FAILED")]


def test_a_word_older_than_the_agents_does_not_queue_what_it_gave_back() -> None:
    """A forwarding schedd reports running for another minute; the failure reason must stay."""
    known = facts(S.PREEMPTED, code=C.NODE_FAILED, claimed=True, ended=True)
    for late in (B.RUNNING, B.SUSPENDED):
        assert path(known, seen(late), NOW) == []
    assert path(known, seen(B.IDLE), NOW) == AGAIN
