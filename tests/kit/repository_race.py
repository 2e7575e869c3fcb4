"""Processes that do the same thing at the same moment, repeatedly."""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing.context import SpawnContext
from typing import Any

from repository.service import Repository, open_repository
from tests.kit.repository_jobs import submission, told
from vmjobs.config import Config
from vmjobs.errors import VMJobsError
from vmjobs.model import AttemptClaim, JobState

#: Takes a repository and one item, and returns a value that pickle supports.
Action = Callable[[Repository, str], Any]
DEADLINE = 120


def claim(repository: Repository, job_id: str) -> str:
    attempt = secrets.token_hex(16)
    repository.attempts.claim(job_id, AttemptClaim(attempt=attempt, node="node1"))
    return attempt


def cancel(repository: Repository, job_id: str) -> str:
    return repository.job_actions.cancel(job_id).state.value


def submit(repository: Repository, key: str) -> tuple[str, bool, int]:
    published: list[str] = []
    done = repository.submissions.submit("ada", submission(3), key, published.append)
    return done.array, done.created, len(published)


def stage(repository: Repository, job_and_attempt: str) -> None:
    job_id, attempt = job_and_attempt.split()
    repository.attempts.report(job_id, attempt, told(JobState.STAGING))


def _work(config: Config, action: Action, items: Sequence[str], barrier: Any, results: Any) -> None:
    repository = open_repository(config, migrate=False)
    found: list[Any] = []
    spans: list[tuple[float, float]] = []
    repository.database.ping()
    for item in items:
        barrier.wait(DEADLINE)
        began = time.monotonic()
        try:
            found.append(action(repository, item))
        except VMJobsError as error:
            found.append(error.code)
        spans.append((began, time.monotonic()))
    results.put((action.__name__, found, spans))
    repository.close()


def race(
    config: Config, actions: Sequence[Action], items: Sequence[str]
) -> list[tuple[str, list[Any]]]:
    """Run each action in its own process over all items, in step; returns names and results.

    At least one pair of actions has to overlap; otherwise there was no race.
    """
    context: SpawnContext = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(len(actions)), context.Queue()
    workers = [
        context.Process(target=_work, args=(config, action, items, barrier, results))
        for action in actions
    ]
    for worker in workers:
        worker.start()
    try:
        done = sorted(results.get(timeout=DEADLINE) for _ in workers)
    finally:
        for worker in workers:
            worker.join(5)
            worker.kill()
    rounds = [sorted(spans) for spans in zip(*(spans for _, _, spans in done), strict=True)]
    overlaps = sum(any(b < end for (_, end), (b, _) in pairwise(spans)) for spans in rounds)
    assert overlaps, f"no two calls overlapped in any of {len(rounds)} rounds: {rounds}"
    return [(name, found) for name, found, _ in done]
