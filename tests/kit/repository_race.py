"""Processes that do the same thing at the same moment, repeatedly."""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from repository.service import Repository, open_repository
from tests.kit.repository_jobs import submission, told
from vmjobs.config import Config
from vmjobs.errors import VMJobsError
from vmjobs.model import AttemptClaim, JobState

#: Takes a repository and one item, and returns a value that pickle supports.
Action = Callable[[Repository, str], Any]
#: The name of an action, what it returned in each round, and when it began and ended.
Result = tuple[str, list[Any], list[tuple[float, float]]]
Race = Callable[[Config, Sequence[Action], Sequence[str]], list[tuple[str, list[Any]]]]
DEADLINE = 120


def claim_job(repository: Repository, job_id: str) -> str:
    attempt = secrets.token_hex(16)
    repository.attempts.claim(job_id, AttemptClaim(attempt=attempt, node="node1"))
    return attempt


def cancel_job(repository: Repository, job_id: str) -> str:
    return repository.job_actions.cancel(job_id).state.value


def submit_jobs(repository: Repository, key: str) -> tuple[str, bool, int]:
    published: list[str] = []
    done = repository.submissions.submit("ada", submission(3), key, published.append)
    return done.array, done.created, len(published)


def stage_job(repository: Repository, job_and_attempt: str) -> None:
    job_id, attempt = job_and_attempt.split()
    repository.attempts.report(job_id, attempt, told(JobState.STAGING))


_barriers: dict[int, Any] = {}


def _begin(barriers: Sequence[Any]) -> None:
    _barriers.update({barrier.parties: barrier for barrier in barriers})


def _work(config: Config, action: Action, items: Sequence[str], racers: int) -> Result:
    repository = open_repository(config, migrate=False)
    found: list[Any] = []
    spans: list[tuple[float, float]] = []
    repository.database.ping()
    for item in items:
        _barriers[racers].wait(DEADLINE)
        began = time.monotonic()
        try:
            found.append(action(repository, item))
        except VMJobsError as error:
            found.append(error.code)
        spans.append((began, time.monotonic()))
    repository.close()
    return action.__name__, found, spans


@pytest.fixture(scope="module")
def race() -> Iterator[Race]:
    """Return a function that runs each action in its own process over all items, in step.

    It returns names and results. At least one pair of actions has to overlap; otherwise there was no
    race. There are three processes, which all tests of a module share.
    """
    context = multiprocessing.get_context("spawn")
    barriers = [context.Barrier(parties) for parties in (2, 3)]

    def run(
        config: Config, actions: Sequence[Action], items: Sequence[str]
    ) -> list[tuple[str, list[Any]]]:
        # Each waits for the others, so that no process gets two of them.
        running = [pool.submit(_work, config, action, items, len(actions)) for action in actions]
        done = sorted(work.result(DEADLINE) for work in running)
        rounds = [sorted(spans) for spans in zip(*(spans for _, _, spans in done), strict=True)]
        overlaps = sum(any(b < end for (_, end), (b, _) in pairwise(spans)) for spans in rounds)
        assert overlaps, f"no two calls overlapped in any of {len(rounds)} rounds: {rounds}"
        return [(name, found) for name, found, _ in done]

    with ProcessPoolExecutor(3, context, initializer=_begin, initargs=(barriers,)) as pool:
        yield run
