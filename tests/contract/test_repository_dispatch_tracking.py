"""Jobs that a scheduler has: what it reports of them, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from repository.jobs import dispatcher, state_policy
from tests.kit.repository_dispatch import B, Grid, S
from tests.kit.repository_jobs import bring, claim, states
from vmjobs.model import JobAction, JobState, ReasonCode, now

pytestmark = pytest.mark.in_process
pytest_plugins = ["tests.kit.repository_dispatch"]


def test_canceled_while_it_runs(grid: Grid) -> None:
    job, attempt = grid.submit(S.RUNNING)
    published: list[Any] = []
    publish = lambda *what: published.append(what)  # noqa: E731
    assert grid.repository.job_actions.cancel(job.id, "ada", publish).state is S.CANCELING
    assert published == [(JobAction.CANCEL, [job.id])]
    dispatcher.cancel_jobs(grid.parts, [job.id])
    assert grid.track(job) is S.CANCELING  # the VM may still exist
    grid.report(job, attempt, S.COLLECTING)  # accepted, without effect
    assert grid.state(job) is S.CANCELING
    for _ in range(2):
        grid.report(job, attempt, S.CANCELED, ReasonCode.USER_CANCELED)
        assert grid.end(job) == (S.CANCELED, ReasonCode.USER_CANCELED)
    assert states(grid.repository, job.id)[-2:] == ["CANCELING", "CANCELED"]


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (S.COMPLETED, ReasonCode.SUCCEEDED),
        (S.FAILED, ReasonCode.SCRIPT_FAILED),
        (S.PREEMPTED, ReasonCode.EVICTED),
        (S.CANCELED, ReasonCode.USER_CANCELED),
    ],
)
def test_a_job_that_the_scheduler_removes_is_canceled_however_it_had_ended(
    grid: Grid, state: JobState, code: ReasonCode
) -> None:
    job, attempt = grid.submit(S.COLLECTING)
    grid.repository.job_actions.cancel(job.id)
    grid.report(job, attempt, state, code)
    assert grid.state(job) is S.CANCELING  # the scheduler has not confirmed yet
    dispatcher.cancel_jobs(grid.parts, [job.id])
    assert grid.track(job) is S.CANCELED


@pytest.mark.parametrize("first", ["the node", "the scheduler"])
@pytest.mark.parametrize(
    ("state", "code"),
    [(S.COMPLETED, ReasonCode.SUCCEEDED), (S.FAILED, ReasonCode.SCRIPT_FAILED)],
)
def test_a_job_that_ended_by_itself_for_the_scheduler_too_is_not_canceled(
    grid: Grid, state: JobState, code: ReasonCode, first: str
) -> None:
    job, attempt = grid.submit(S.COLLECTING)
    grid.repository.job_actions.cancel(job.id)
    steps: list[Callable[[], object]] = [
        lambda: grid.report(job, attempt, state, code),
        lambda: (grid.schedd.say(job.id, B.COMPLETED), grid.track(job)),
    ]
    for step in steps if first == "the node" else reversed(steps):
        assert grid.state(job) is S.CANCELING
        step()
    assert grid.end(job) == (state, code)
    assert states(grid.repository, job.id)[-2:] == ["CANCELING", state.value]


def test_held_and_released(grid: Grid) -> None:
    job, _ = grid.submit()
    grid.schedd.say(job.id, B.HELD, "no such route")
    dispatcher.track(grid.parts)
    assert grid.end(job) == (S.HELD, ReasonCode.SCHEDULER_HELD)
    assert grid.repository.jobs.get(job.id).reason.message == "no such route"
    version = grid.repository.jobs.version(job.id)
    dispatcher.track(grid.parts)
    assert grid.repository.jobs.version(job.id) == version
    grid.schedd.say(job.id, B.IDLE)
    dispatcher.reconcile(grid.parts)
    assert grid.state(job) is S.QUEUED


def test_evicted_and_run_again(grid: Grid) -> None:
    job, attempt = grid.submit(S.STAGING)
    assert grid.track(job) is S.STAGING  # still idle there: a late event, not an eviction
    grid.schedd.say(job.id, B.RUNNING)
    dispatcher.track(grid.parts)
    bring(grid.repository, job.id, attempt, S.RUNNING)
    grid.schedd.say(job.id, B.IDLE)
    dispatcher.track(grid.parts)
    assert states(grid.repository, job.id)[-2:] == ["PREEMPTED", "QUEUED"]
    bring(grid.repository, job.id, claim(grid.repository, job.id, "node2"), S.RUNNING)
    assert grid.state(job) is S.RUNNING


def test_an_agent_that_is_at_work_after_all(grid: Grid) -> None:
    job, attempt = grid.submit(S.RUNNING)
    grid.schedd.say(job.id, B.HELD, "a hold that was lifted at once")
    assert grid.track(job) is S.HELD
    grid.report(job, attempt, S.COLLECTING)
    grid.report(job, attempt, S.COMPLETED, ReasonCode.SUCCEEDED, 0)
    assert states(grid.repository, job.id)[-6:] == [
        "QUEUED", "STAGING", "BOOTING", "RUNNING", "COLLECTING", "COMPLETED",
    ]  # fmt: skip


def test_a_batch_job_that_ends_without_a_report(grid: Grid) -> None:
    job, _ = grid.submit(S.RUNNING)
    grid.schedd.say(job.id, B.COMPLETED, exit_code=0)
    assert grid.track(job) is S.RUNNING
    grid.later(state_policy.REPORT_GRACE)
    grid.schedd.queue.clear()  # no more events: the stored state decides
    dispatcher.track(grid.parts)
    assert grid.end(job) == (S.FAILED, ReasonCode.NO_EXIT_REPORT)
    assert "ended with code 0" in grid.repository.jobs.get(job.id).reason.message


def test_lost_at_the_schedd(grid: Grid) -> None:
    job, _ = grid.submit()
    grid.schedd.queue.clear()
    dispatcher.reconcile(grid.parts)
    assert grid.state(job) is S.QUEUED
    grid.later(state_policy.LOST_AFTER)
    dispatcher.reconcile(grid.parts)
    assert grid.end(job) == (S.FAILED, ReasonCode.SCHEDULER_LOST)


def test_an_answer_older_than_the_event_log_is_ignored(grid: Grid) -> None:
    job, _ = grid.submit()
    asked = now()
    old = grid.schedd.say(job.id, B.HELD, "stale")
    grid.repository.condor_sync.observe([grid.schedd.say(job.id, B.RUNNING)])
    grid.repository.condor_sync.observe([old], asked)
    assert grid.state(job) is S.QUEUED
