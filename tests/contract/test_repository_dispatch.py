"""Jobs on their way to a scheduler and back, on both databases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from repository_kit import Ledger, bring, claim, dispatcher, one, states, submission, told

from repository import batch, decide, dispatch
from repository.dispatch import Dispatch
from repository.service import Repository
from vmjobs.errors import ConfigError, InvalidSpec, NotFound, Unavailable
from vmjobs.model import Job, JobState, ReasonCode, now
from vmjobs.ports import BatchStatus

pytestmark = pytest.mark.in_process

S, B = JobState, BatchStatus


@pytest.fixture
def schedd() -> Ledger:
    return Ledger()


@pytest.fixture
def parts(repository: Repository, schedd: Ledger) -> Dispatch:
    return dispatcher(repository, schedd)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    """Let time pass for what decides about graces."""

    def jump(span: timedelta) -> None:
        for module in (batch, dispatch):
            monkeypatch.setattr(module, "utc_now", lambda: now() + span)

    return jump


def test_an_array_is_submitted_once(repository: Repository, schedd: Ledger, parts: Dispatch) -> None:
    array, jobs, _ = repository.submit("ada", submission(3))
    dispatch.submit_array(parts, array)
    dispatch.submit_array(parts, array)
    assert schedd.submitted == 3
    for job in jobs:
        seen = repository.job(job.id)
        assert seen.condor == schedd.queue[job.id].ref
        assert (seen.state, seen.reason.code) == (S.QUEUED, ReasonCode.SCHEDULED)
        assert schedd.tokens[job.id] == f"token {job.id} ada"
    with pytest.raises(NotFound):
        dispatch.submit_array(parts, "0" * 32)


def test_a_schedd_that_is_down_is_told_once(
    repository: Repository, schedd: Ledger, parts: Dispatch
) -> None:
    job = one(repository)
    schedd.down = True
    for _ in range(2):
        with pytest.raises(Unavailable):
            dispatch.submit_array(parts, job.array)
    waiting = repository.job(job.id)
    assert (waiting.state, waiting.reason.code) == (S.QUEUED, ReasonCode.SCHEDULER_UNAVAILABLE)
    assert states(repository, job.id) == ["QUEUED"]
    schedd.down = False
    dispatch.submit_array(parts, job.array)
    assert repository.job(job.id).reason.code is ReasonCode.SCHEDULED


def test_killed_between_submission_and_record(
    repository: Repository, schedd: Ledger, parts: Dispatch, later: Callable[[timedelta], None]
) -> None:
    job = one(repository)
    lost = Ledger()
    lost.queue = schedd.queue
    submit = schedd.submit

    class Killed(BaseException):
        pass

    def submit_and_die(jobs):  # type: ignore[no-untyped-def]
        submit(jobs)
        raise Killed

    schedd.submit = submit_and_die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        dispatch.submit_array(parts, job.array)
    assert repository.job(job.id).condor is None
    schedd.submit = submit  # type: ignore[method-assign]
    later(dispatch.UNDISPATCHED)
    dispatch.sweep(parts)
    assert repository.job(job.id).condor == schedd.queue[job.id].ref
    assert schedd.submitted == 1


def test_killed_between_submission_and_record_then_canceled(
    repository: Repository, schedd: Ledger, parts: Dispatch
) -> None:
    job = one(repository)
    (ready,) = repository.begin_dispatch(job.array)
    schedd.submit([dispatch.BatchJob(ready.id, ready.array, 0, "ada", ready.spec, "t")])
    assert repository.cancel(job.id).state is S.CANCELING
    dispatch.cancel_job(parts, job.id)
    assert schedd.removed == [schedd.queue[job.id].ref]
    dispatch.track(parts)
    assert repository.job(job.id).state is S.CANCELED


def test_canceled_while_it_is_being_submitted(
    repository: Repository, schedd: Ledger, parts: Dispatch
) -> None:
    job = one(repository)
    submit = schedd.submit

    def submit_slowly(jobs):  # type: ignore[no-untyped-def]
        assert repository.cancel(job.id).state is S.CANCELING
        dispatch.cancel_job(parts, job.id)  # finds the submission under way, and leaves it to it
        return submit(jobs)

    schedd.submit = submit_slowly  # type: ignore[method-assign]
    dispatch.submit_array(parts, job.array)
    assert schedd.removed == [schedd.queue[job.id].ref]
    dispatch.track(parts)
    assert repository.job(job.id).state is S.CANCELED


def test_canceled_before_it_was_submitted(
    repository: Repository, schedd: Ledger, parts: Dispatch
) -> None:
    array, (first, second), _ = repository.submit("ada", submission(2))
    assert repository.cancel(first.id).state is S.CANCELED
    dispatch.cancel_job(parts, first.id)
    dispatch.submit_array(parts, array)
    assert list(schedd.queue) == [second.id]


def test_marked_for_dispatch_but_never_there(
    repository: Repository, schedd: Ledger, parts: Dispatch
) -> None:
    job = one(repository)
    repository.begin_dispatch(job.array)
    repository.cancel(job.id)
    dispatch.cancel_job(parts, job.id)
    assert repository.job(job.id).state is S.CANCELED
    assert schedd.removed == []


def test_canceled_while_it_runs(
    repository: Repository, schedd: Ledger, parts: Dispatch, later: Callable[[timedelta], None]
) -> None:
    job = one(repository)
    dispatch.submit_array(parts, job.array)
    attempt = claim(repository, job.id)
    bring(repository, job.id, attempt, S.RUNNING)
    published: list[str] = []
    assert repository.cancel(job.id, "ada", published.append).state is S.CANCELING
    assert published == [job.id]
    dispatch.cancel_job(parts, job.id)
    dispatch.track(parts)
    assert repository.job(job.id).state is S.CANCELING  # the VM may still be there
    repository.report(job.id, attempt, told(S.COLLECTING))  # accepted, and moves nothing
    assert repository.job(job.id).state is S.CANCELING
    repository.report(job.id, attempt, told(S.CANCELED, ReasonCode.USER_CANCELED))
    done = repository.job(job.id)
    assert (done.state, done.reason.code) == (S.CANCELED, ReasonCode.USER_CANCELED)
    repository.report(job.id, attempt, told(S.CANCELED, ReasonCode.USER_CANCELED))
    assert states(repository, job.id)[-2:] == ["CANCELING", "CANCELED"]


def test_the_node_speaks_before_the_scheduler(
    repository: Repository, schedd: Ledger, parts: Dispatch
) -> None:
    job = one(repository)
    dispatch.submit_array(parts, job.array)
    attempt = claim(repository, job.id)
    repository.cancel(job.id)
    repository.report(job.id, attempt, told(S.CANCELED, ReasonCode.USER_CANCELED))
    assert repository.job(job.id).state is S.CANCELING
    dispatch.cancel_job(parts, job.id)
    dispatch.track(parts)
    assert repository.job(job.id).state is S.CANCELED


def test_a_node_that_never_confirms(
    repository: Repository, schedd: Ledger, parts: Dispatch, later: Callable[[timedelta], None]
) -> None:
    job = one(repository)
    dispatch.submit_array(parts, job.array)
    claim(repository, job.id)
    repository.cancel(job.id)
    dispatch.cancel_job(parts, job.id)
    dispatch.track(parts)
    assert repository.job(job.id).state is S.CANCELING
    later(decide.CANCEL_GRACE)
    dispatch.track(parts)
    done = repository.job(job.id)
    assert done.state is S.CANCELED
    assert "did not confirm" in done.reason.message


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (S.COMPLETED, ReasonCode.SUCCEEDED),
        (S.FAILED, ReasonCode.SCRIPT_FAILED),
        (S.FAILED, ReasonCode.SCRIPT_KILLED),
        (S.FAILED, ReasonCode.GUEST_LOST),
        (S.PREEMPTED, ReasonCode.EVICTED),
    ],
)
def test_a_job_that_the_scheduler_removes_is_canceled_however_it_had_ended(
    repository: Repository, parts: Dispatch, state: S, code: ReasonCode
) -> None:
    job, attempt = canceling(repository, parts)
    repository.report(job.id, attempt, told(state, code))
    assert repository.job(job.id).state is S.CANCELING  # the scheduler's word is what is missing
    dispatch.cancel_job(parts, job.id)
    dispatch.track(parts)
    assert repository.job(job.id).state is S.CANCELED


@pytest.mark.parametrize("first", ["the node", "the scheduler"])
@pytest.mark.parametrize(
    ("state", "code"),
    [(S.COMPLETED, ReasonCode.SUCCEEDED), (S.FAILED, ReasonCode.SCRIPT_FAILED)],
)
def test_a_job_that_ended_by_itself_for_the_scheduler_too_is_not_canceled(
    repository: Repository, schedd: Ledger, parts: Dispatch, state: S, code: ReasonCode, first: str
) -> None:
    job, attempt = canceling(repository, parts)
    steps = [
        lambda: repository.report(job.id, attempt, told(state, code)),
        lambda: (schedd.say(job.id, B.COMPLETED), dispatch.track(parts)),
    ]
    for step in steps if first == "the node" else reversed(steps):
        assert repository.job(job.id).state is S.CANCELING
        step()
    done = repository.job(job.id)
    assert (done.state, done.reason.code) == (state, code)
    assert states(repository, job.id)[-2:] == ["CANCELING", state.value]


def canceling(repository: Repository, parts: Dispatch) -> tuple[Job, str]:
    """A job that is canceled while its files are collected, and its attempt."""
    job = one(repository)
    dispatch.submit_array(parts, job.array)
    attempt = claim(repository, job.id)
    bring(repository, job.id, attempt, S.COLLECTING)
    repository.cancel(job.id)
    return job, attempt


def test_removed_at_the_scheduler(repository: Repository, schedd: Ledger, parts: Dispatch) -> None:
    job = one(repository)
    dispatch.submit_array(parts, job.array)
    attempt = claim(repository, job.id)
    bring(repository, job.id, attempt, S.RUNNING)
    schedd.say(job.id, B.REMOVED, "via condor_rm (by user ada)")
    dispatch.track(parts)
    assert repository.job(job.id).state is S.CANCELING
    repository.report(job.id, attempt, told(S.CANCELED, ReasonCode.SCHEDULER_REMOVED))
    done = repository.job(job.id)
    assert (done.state, done.reason.code) == (S.CANCELED, ReasonCode.SCHEDULER_REMOVED)


def test_held_and_released(repository: Repository, schedd: Ledger, parts: Dispatch) -> None:
    job = one(repository)
    dispatch.submit_array(parts, job.array)
    schedd.say(job.id, B.HELD, "no such route")
    dispatch.track(parts)
    held = repository.job(job.id)
    assert (held.state, held.reason.code) == (S.HELD, ReasonCode.SCHEDULER_HELD)
    assert held.reason.message == "no such route"
    version = repository.version(job.id)
    dispatch.track(parts)
    assert repository.version(job.id) == version
    schedd.say(job.id, B.IDLE)
    dispatch.reconcile(parts)
    assert repository.job(job.id).state is S.QUEUED


def test_evicted_and_run_again(repository: Repository, schedd: Ledger, parts: Dispatch) -> None:
    job = one(repository)
    dispatch.submit_array(parts, job.array)
    attempt = claim(repository, job.id)
    bring(repository, job.id, attempt, S.STAGING)
    dispatch.track(parts)  # still idle there: late news, not an eviction
    assert repository.job(job.id).state is S.STAGING
    schedd.say(job.id, B.RUNNING)
    dispatch.track(parts)
    bring(repository, job.id, attempt, S.RUNNING)
    schedd.say(job.id, B.IDLE)
    dispatch.track(parts)
    assert states(repository, job.id)[-2:] == ["PREEMPTED", "QUEUED"]
    bring(repository, job.id, claim(repository, job.id, "node2"), S.RUNNING)
    assert repository.job(job.id).state is S.RUNNING


def test_an_agent_that_is_at_work_after_all(
    repository: Repository, schedd: Ledger, parts: Dispatch
) -> None:
    job = one(repository)
    dispatch.submit_array(parts, job.array)
    attempt = claim(repository, job.id)
    bring(repository, job.id, attempt, S.RUNNING)
    schedd.say(job.id, B.HELD, "a hold that was lifted at once")
    dispatch.track(parts)
    assert repository.job(job.id).state is S.HELD
    repository.report(job.id, attempt, told(S.COLLECTING))
    repository.report(job.id, attempt, told(S.COMPLETED, ReasonCode.SUCCEEDED, 0))
    assert states(repository, job.id)[-6:] == [
        "QUEUED", "STAGING", "BOOTING", "RUNNING", "COLLECTING", "COMPLETED",
    ]  # fmt: skip


def test_a_batch_job_that_ends_without_a_report(
    repository: Repository, schedd: Ledger, parts: Dispatch, later: Callable[[timedelta], None]
) -> None:
    job = one(repository)
    dispatch.submit_array(parts, job.array)
    bring(repository, job.id, claim(repository, job.id), S.RUNNING)
    schedd.say(job.id, B.COMPLETED, exit_code=0)
    dispatch.track(parts)
    assert repository.job(job.id).state is S.RUNNING
    later(decide.REPORT_GRACE)
    schedd.queue.clear()  # the event log is not heard again: what was stored decides
    dispatch.track(parts)
    done = repository.job(job.id)
    assert (done.state, done.reason.code) == (S.FAILED, ReasonCode.NO_EXIT_REPORT)
    assert "ended with code 0" in done.reason.message


def test_lost_at_the_schedd(
    repository: Repository, schedd: Ledger, parts: Dispatch, later: Callable[[timedelta], None]
) -> None:
    job = one(repository)
    dispatch.submit_array(parts, job.array)
    schedd.queue.clear()
    dispatch.reconcile(parts)
    assert repository.job(job.id).state is S.QUEUED
    later(decide.LOST_AFTER)
    dispatch.reconcile(parts)
    done = repository.job(job.id)
    assert (done.state, done.reason.code) == (S.FAILED, ReasonCode.SCHEDULER_LOST)


def test_an_answer_older_than_the_event_log_is_ignored(
    repository: Repository, schedd: Ledger, parts: Dispatch
) -> None:
    job = one(repository)
    dispatch.submit_array(parts, job.array)
    asked = now()
    old = schedd.say(job.id, B.HELD, "stale")
    repository.observe([schedd.say(job.id, B.RUNNING)])
    repository.observe([old], asked)
    assert repository.job(job.id).state is S.QUEUED


def test_the_sweep_submits_what_was_left(
    repository: Repository, schedd: Ledger, parts: Dispatch, later: Callable[[timedelta], None]
) -> None:
    job = one(repository)
    dispatch.sweep(parts)
    assert schedd.submitted == 0
    later(dispatch.UNDISPATCHED)
    dispatch.sweep(parts)
    assert schedd.submitted == 1
    assert repository.job(job.id).condor is not None


def test_the_sweep_goes_on_where_storage_does_not_answer(
    repository: Repository, schedd: Ledger, parts: Dispatch, later: Callable[[timedelta], None]
) -> None:
    def broken() -> int:
        raise Unavailable("storage", "the storage does not answer")

    one(repository)
    later(dispatch.UNDISPATCHED)
    dispatch.sweep(replace(parts, clean=(broken,)))
    assert schedd.submitted == 1


def test_the_sweep_cancels_what_the_broker_lost(
    repository: Repository, schedd: Ledger, parts: Dispatch, later: Callable[[timedelta], None]
) -> None:
    job = one(repository)
    dispatch.submit_array(parts, job.array)

    def publish(_: str) -> None:
        raise Unavailable("broker", "down")

    assert repository.cancel(job.id, "ada", publish).state is S.CANCELING
    later(dispatch.LEFT_OVER)
    dispatch.sweep(parts)
    assert schedd.removed == [schedd.queue[job.id].ref]


def test_the_sweep_tidies_up_after_the_end(
    repository: Repository, schedd: Ledger, parts: Dispatch, later: Callable[[timedelta], None]
) -> None:
    array, (first, second), _ = repository.submit("ada", submission(2))
    dispatch.submit_array(parts, array)
    for job, code in ((first, ReasonCode.SCRIPT_FAILED), (second, ReasonCode.IMAGE_REJECTED)):
        attempt = claim(repository, job.id)
        repository.report(job.id, attempt, told(S.FAILED, code))
    schedd.say(first.id, B.COMPLETED, exit_code=1)
    schedd.say(second.id, B.HELD, "image rejected")  # held for ever, if nobody removed it
    dispatch.track(parts)
    dispatch.sweep(parts)
    assert schedd.forgotten == []
    later(dispatch.LEFT_OVER)
    dispatch.sweep(parts)
    assert schedd.removed == []  # it may not have heard of the end, and hear of it from a node
    later(dispatch.ENDED)
    dispatch.sweep(parts)
    assert schedd.removed == [schedd.queue[second.id].ref]
    assert repository.leftover(second.id).why == "the job is FAILED already"
    dispatch.track(parts)
    dispatch.sweep(parts)
    dispatch.sweep(parts)
    assert schedd.forgotten == [array]
    assert repository.active_arrays() == []


def test_bad_settings_make_jobs_wait(repository: Repository, schedd: Ledger, parts: Dispatch) -> None:
    job = one(repository)

    def refuse(jobs):  # type: ignore[no-untyped-def]
        raise ConfigError("route 'site' is no grid_resource")

    submit, schedd.submit = schedd.submit, refuse  # type: ignore[method-assign]
    dispatch.submit_array(parts, job.array)
    waiting = repository.job(job.id)
    assert waiting.state is S.QUEUED
    assert waiting.reason.message == "route 'site' is no grid_resource"
    schedd.submit = submit  # type: ignore[method-assign]
    dispatch.submit_array(parts, job.array)
    assert repository.job(job.id).condor is not None


def test_jobs_the_scheduler_side_cannot_describe_fail(
    repository: Repository, schedd: Ledger, parts: Dispatch, later: Callable[[timedelta], None]
) -> None:
    job = one(repository)

    def refuse(jobs):  # type: ignore[no-untyped-def]
        raise InvalidSpec("an argument has a character that no quoting carries")

    schedd.submit = refuse  # type: ignore[method-assign]
    dispatch.submit_array(parts, job.array)
    done = repository.job(job.id)
    assert done.state is S.FAILED
    assert "no quoting" in done.reason.message
    later(dispatch.ENDED)
    dispatch.sweep(parts)
    assert schedd.forgotten == [job.array]
