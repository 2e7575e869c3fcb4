"""Of two concurrent processes only one succeeds, on both databases."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from repository.jobs import dispatcher
from repository.service import Repository
from tests.kit.repository_jobs import Ledger, claim, dispatch_context, one, states, submission, told
from tests.kit.repository_race import Race, cancel_job, claim_job, stage_job, submit_jobs
from vmjobs.batch import BatchStatus
from vmjobs.config import Config
from vmjobs.errors import AttemptSuperseded, NotFound, Unavailable
from vmjobs.model import JobState

pytestmark = pytest.mark.both_databases
pytest_plugins = ["tests.kit.repository_race"]

S = JobState
ROUNDS = 12


def test_claims_at_once(race: Race, config: Config, repository: Repository) -> None:
    ids = [one(repository).id for _ in range(ROUNDS)]
    won = [attempts for _, attempts in race(config, [claim_job] * 3, ids)]
    for job_id, attempts in zip(ids, zip(*won, strict=True), strict=True):
        job = repository.jobs.get(job_id)
        assert (job.attempts, job.state) == (3, S.QUEUED)
        assert [e.seq for e in repository.jobs.events(job_id)] == [1, 2, 3, 4]
        current = []
        for attempt in attempts:
            try:
                repository.attempts.report(job_id, attempt, told(S.STAGING))
                current.append(attempt)
            except AttemptSuperseded:
                continue
        assert len(current) == 1


def test_one_key_at_once(race: Race, config: Config, repository: Repository) -> None:
    keys = [f"key{n}" for n in range(ROUNDS)]
    done = [answers for _, answers in race(config, [submit_jobs] * 3, keys)]
    for answers in zip(*done, strict=True):
        assert len({array for array, _, _ in answers}) == 1
        said = sorted((created, published) for _, created, published in answers)
        assert said == [(False, 0), (False, 0), (True, 1)]
    assert len(repository.jobs.page("ada").jobs) == 3 * ROUNDS


def test_cancel_against_claim(race: Race, config: Config, repository: Repository) -> None:
    ids = [one(repository).id for _ in range(ROUNDS)]
    (_, canceled), (_, claimed) = race(config, [cancel_job, claim_job], ids)
    for job_id, said, attempt in zip(ids, canceled, claimed, strict=True):
        job = repository.jobs.get(job_id)
        assert job.state.value == said
        if job.state is S.CANCELED:  # the cancel came first: no attempt started
            assert attempt == "JOB_FINAL"
        else:
            assert job.state is S.CANCELING
            assert job.attempts == 1
            assert len(attempt) == 32


def test_one_report_at_once(race: Race, config: Config, repository: Repository) -> None:
    ids = [one(repository).id for _ in range(ROUNDS)]
    race(config, [stage_job] * 3, [f"{job_id} {claim(repository, job_id)}" for job_id in ids])
    for job_id in ids:
        assert states(repository, job_id).count("STAGING") == 1


@pytest.mark.parametrize("count", [1, 3])
def test_cancel_against_submission_to_the_scheduler(
    repository: Repository, other: Repository, count: int
) -> None:
    for _ in range(ROUNDS):
        schedd = Ledger()
        array, jobs, _ = repository.submissions.submit("ada", submission(count))
        start = threading.Barrier(3)

        def submit(
            schedd: Ledger = schedd, array: str = array, start: threading.Barrier = start
        ) -> None:
            start.wait(30)
            dispatcher.submit_array(dispatch_context(repository, schedd), array)

        threads = [threading.Thread(target=submit), threading.Thread(target=submit)]
        for thread in threads:
            thread.start()
        start.wait(30)
        other.job_actions.cancel(jobs[0].id)
        dispatcher.cancel_jobs(dispatch_context(other, schedd), [jobs[0].id])
        for thread in threads:
            thread.join()
        dispatcher.track(dispatch_context(other, schedd))
        assert repository.jobs.get(jobs[0].id).state is S.CANCELED
        left = [s.job_id for s in schedd.queue.values() if s.status is BatchStatus.IDLE]
        assert sorted(left) == sorted(job.id for job in jobs[1:])
        assert schedd.submitted == len(schedd.queue)


def test_a_message_before_its_commit(repository: Repository, other: Repository) -> None:
    """A worker that is faster than the commit finds no job, and tries again."""
    schedd, early = Ledger(), []

    def publish(array: str) -> None:
        if repository.database.url.get_backend_name() == "postgresql":
            with pytest.raises(NotFound):
                dispatcher.submit_array(dispatch_context(other, schedd), array)
        early.append(array)

    array = repository.submissions.submit("ada", submission(), publish=publish).array
    dispatcher.submit_array(dispatch_context(other, schedd), array)
    assert early == [array]
    assert schedd.submitted == 1


@pytest.mark.parametrize("database", ["own_postgresql"], indirect=True)
def test_a_database_that_falls_over_and_comes_back(repository: Repository, own_postgresql: Any) -> None:
    job = one(repository)
    repository.jobs.page("ada")
    own_postgresql.stop()
    try:
        for ask in (
            lambda: repository.jobs.get(job.id),
            lambda: claim(repository, job.id),
            repository.database.ping,
        ):
            with pytest.raises(Unavailable) as caught:
                ask()
            assert caught.value.service == "database"
        with (
            pytest.raises(Unavailable),
            repository.database.exclusive("track") as alone,
        ):
            assert not alone
    finally:
        own_postgresql.start()
    assert repository.jobs.get(job.id) == job
    claim(repository, job.id)


def test_an_exclusive_block_is_alone_and_ends_with_its_owner(
    repository: Repository, other: Repository
) -> None:
    with repository.database.exclusive("track") as first:
        assert first
        with other.database.exclusive("track") as second:
            assert not second
        with other.database.exclusive("sweep") as third:
            assert third
    for _ in range(20):  # released at the end of the block, not later
        for database in (repository.database, other.database):
            with database.exclusive("track") as again:
                assert again


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)  # its locks are files
def test_a_build_never_holds_up_what_is_done_every_few_seconds(repository: Repository) -> None:
    # More builds than lock files of a kind: some builds share a number with the task.
    for number in range(3000):
        with (
            repository.database.exclusive(f"build {number:032x}") as first,
            repository.database.exclusive("vmjobs.track") as second,
        ):
            assert (first, second) == (True, True)
