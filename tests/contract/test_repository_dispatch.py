"""Jobs on their way to a scheduler, and what the sweep submits, cancels and removes later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from repository.jobs import dispatcher
from tests.kit.repository_dispatch import B, Grid, S
from tests.kit.repository_jobs import Ledger, claim, one, refused, states, submission
from vmjobs.batch import BatchJob
from vmjobs.errors import ConfigError, InvalidSpec, NotFound, Unavailable
from vmjobs.job_sets import JobSelection
from vmjobs.model import JobAction, JobState, ReasonCode

pytestmark = pytest.mark.in_process
pytest_plugins = ["tests.kit.repository_dispatch"]


def instead(of: Ledger, submit: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a scheduler's submit function; return the former one."""
    before, of.submit = of.submit, submit  # type: ignore[method-assign]
    return before


@pytest.mark.both_databases
def test_an_array_is_submitted_once(grid: Grid) -> None:
    array, jobs, _ = grid.repository.submissions.submit("ada", submission(3))
    for _ in range(2):
        dispatcher.submit_array(grid.parts, array)
    assert grid.schedd.submitted == 3
    for job in jobs:
        assert grid.repository.jobs.get(job.id).condor == grid.schedd.queue[job.id].ref
        assert grid.end(job) == (S.QUEUED, ReasonCode.SCHEDULED)
        assert grid.schedd.tokens[job.id] == f"token {job.id} ada"
    refused(NotFound, lambda: dispatcher.submit_array(grid.parts, "0" * 32))


def test_what_waits_goes_together_and_owners_take_turns(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_SUBMIT_JOBS", 4)
    large = [grid.repository.submissions.submit("ada", submission(3)).jobs for _ in range(2)]
    jobs = [one(grid.repository, owner) for owner in ("ada", "bob", "ada")]
    together: list[list[str]] = []
    submit = instead(
        grid.schedd,
        lambda condor_sync: [together.append([j.id for j in condor_sync]), submit(condor_sync)][1],
    )
    dispatcher.submit_array(grid.parts, jobs[-1].array)
    ada, bob, last = [job.id for job in jobs]
    first, second = [[job.id for job in array] for array in large]
    assert together == [[bob, *first], [*second, ada], [last]]


def test_an_array_that_is_refused_holds_up_no_other(grid: Grid) -> None:
    jobs = [one(grid.repository, name=f"job {n}") for n in range(5)]

    def refuse(together: Any) -> Any:
        if any(job.spec.name == "job 2" for job in together):
            raise ConfigError("the schedd takes no such job")
        return submit(together)

    submit = instead(grid.schedd, refuse)
    dispatcher.submit_array(grid.parts, jobs[2].array)
    waits = [job for job in jobs if grid.repository.jobs.get(job.id).condor is None]
    assert waits == [jobs[2]]
    assert grid.end(jobs[2]) == (S.QUEUED, ReasonCode.SCHEDULER_UNAVAILABLE)


def test_a_schedd_that_is_down_is_told_once(grid: Grid) -> None:
    job = one(grid.repository)
    grid.schedd.down = True
    refused(Unavailable, *[lambda: dispatcher.submit_array(grid.parts, job.array)] * 2)
    assert grid.end(job) == (S.QUEUED, ReasonCode.SCHEDULER_UNAVAILABLE)
    assert states(grid.repository, job.id) == ["QUEUED"]
    grid.schedd.down = False
    dispatcher.submit_array(grid.parts, job.array)
    assert grid.end(job) == (S.QUEUED, ReasonCode.SCHEDULED)


class Killed(BaseException):
    """The worker is killed."""


def test_killed_between_submission_and_record(grid: Grid) -> None:
    job = one(grid.repository)

    def submit_and_die(jobs: Any) -> None:
        submit(jobs)
        raise Killed

    submit = instead(grid.schedd, submit_and_die)
    with pytest.raises(Killed):
        dispatcher.submit_array(grid.parts, job.array)
    assert grid.repository.jobs.get(job.id).condor is None
    instead(grid.schedd, submit)
    grid.sweep()
    assert grid.repository.jobs.get(job.id).condor == grid.schedd.queue[job.id].ref
    assert grid.schedd.submitted == 1


def test_killed_between_submission_and_record_then_canceled(grid: Grid) -> None:
    job = one(grid.repository)
    (ready,) = grid.repository.condor_sync.begin_dispatch(1)
    grid.schedd.submit([BatchJob(ready.id, ready.array, 0, "ada", ready.spec, "t")])
    grid.cancel(job)
    assert grid.schedd.removed == [grid.schedd.queue[job.id].ref]
    assert grid.track(job) is S.CANCELED


def test_canceled_while_it_is_being_submitted(grid: Grid) -> None:
    job = one(grid.repository)

    def submit_slowly(jobs: Any) -> Any:
        grid.cancel(job)  # left to the submission, which is under way
        return submit(jobs)

    submit = instead(grid.schedd, submit_slowly)
    dispatcher.submit_array(grid.parts, job.array)
    assert grid.schedd.removed == [grid.schedd.queue[job.id].ref]
    assert grid.track(job) is S.CANCELED


def test_canceled_before_it_was_submitted(grid: Grid) -> None:
    array, (first, second), _ = grid.repository.submissions.submit("ada", submission(2))
    assert grid.repository.job_actions.cancel(first.id).state is S.CANCELED
    dispatcher.cancel_jobs(grid.parts, [first.id])
    dispatcher.submit_array(grid.parts, array)
    assert list(grid.schedd.queue) == [second.id]


def test_a_set_is_changed_by_one_call(grid: Grid) -> None:
    array, jobs, _ = grid.repository.submissions.submit("ada", submission(3))
    late = one(grid.repository)
    dispatcher.submit_waiting(grid.parts)
    unsent = one(grid.repository)
    selection = JobSelection(jobs=(array, unsent.id, late.id))

    def change(action: JobAction) -> set[JobState]:
        grid.repository.job_actions.change(
            action, selection, "ada", lambda *what: dispatcher.change_jobs(grid.parts, *what)
        )
        dispatcher.track(grid.parts)
        return {grid.state(job) for job in (*jobs, late, unsent)}

    for _ in range(2):
        assert change(JobAction.HOLD) == {S.HELD}
        assert grid.repository.jobs.get(unsent.id).reason.code is ReasonCode.USER_HELD
    grid.sweep()
    assert grid.repository.jobs.get(unsent.id).condor is None
    assert change(JobAction.RELEASE) == {S.QUEUED}
    assert grid.repository.jobs.get(unsent.id).condor is not None
    assert change(JobAction.CANCEL) == {S.CANCELED}
    assert change(JobAction.HOLD) == {S.CANCELED}
    assert grid.schedd.acts == [(JobAction.HOLD, 4), (JobAction.RELEASE, 4), (JobAction.CANCEL, 5)]


def test_marked_for_dispatch_but_never_there(grid: Grid) -> None:
    job = one(grid.repository)
    grid.repository.condor_sync.begin_dispatch(1)
    grid.cancel(job)
    assert (grid.state(job), grid.schedd.removed) == (S.CANCELED, [])


def test_the_sweep_submits_what_was_left_even_where_storage_does_not_answer(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> int:
        raise Unavailable("storage", "the storage does not answer")

    job = one(grid.repository)
    monkeypatch.setattr(grid.repository.blobs, "clean", broken)
    grid.sweep()
    assert grid.schedd.submitted == 1
    assert grid.repository.jobs.get(job.id).condor is not None


def test_the_sweep_cancels_what_the_broker_lost(grid: Grid) -> None:
    job, _ = grid.submit()

    def publish(*_: object) -> None:
        raise Unavailable("broker", "down")

    assert grid.repository.job_actions.cancel(job.id, "ada", publish).state is S.CANCELING
    grid.later(dispatcher.REMOVE_CANCELED_AFTER)
    grid.sweep()
    assert grid.schedd.removed == [grid.schedd.queue[job.id].ref]


def test_the_sweep_tidies_up_after_the_end(grid: Grid) -> None:
    array, (first, second), _ = grid.repository.submissions.submit("ada", submission(2))
    dispatcher.submit_array(grid.parts, array)
    for job, code in ((first, ReasonCode.SCRIPT_FAILED), (second, ReasonCode.IMAGE_REJECTED)):
        grid.report(job, claim(grid.repository, job.id), S.FAILED, code)
    grid.schedd.say(first.id, B.COMPLETED, exit_code=1)
    grid.schedd.say(second.id, B.HELD, "image rejected")  # held until removed
    dispatcher.track(grid.parts)
    grid.sweep()
    assert grid.schedd.forgotten == []
    grid.later(dispatcher.REMOVE_CANCELED_AFTER)
    grid.sweep()
    assert grid.schedd.removed == []  # a node may still report the end to it
    grid.later(dispatcher.REMOVE_ENDED_AFTER)
    grid.sweep()
    assert grid.schedd.removed == [grid.schedd.queue[second.id].ref]
    (left,) = grid.repository.condor_sync.jobs_to_remove([second.id])
    assert left.why == "the job is FAILED already"
    dispatcher.track(grid.parts)
    grid.sweep()
    grid.sweep()
    assert grid.schedd.forgotten == [array]
    assert grid.repository.condor_sync.active_arrays() == []


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (ConfigError("route 'site' is no grid_resource"), S.QUEUED),
        (InvalidSpec("an argument has a character that no quoting carries"), S.FAILED),
    ],
)
def test_jobs_wait_for_settings_and_fail_where_nothing_will_do(
    grid: Grid, error: Exception, state: JobState
) -> None:
    job = one(grid.repository)

    def refuse(_: Any) -> None:
        raise error

    submit = instead(grid.schedd, refuse)
    dispatcher.submit_array(grid.parts, job.array)
    assert grid.state(job) is state
    assert str(error) in grid.repository.jobs.get(job.id).reason.message
    instead(grid.schedd, submit)
    dispatcher.submit_array(grid.parts, job.array)
    assert (grid.repository.jobs.get(job.id).condor is not None) == (state is S.QUEUED)
    grid.later(dispatcher.REMOVE_ENDED_AFTER)
    grid.sweep()
    assert grid.schedd.forgotten == [job.array] * (state is S.FAILED)
