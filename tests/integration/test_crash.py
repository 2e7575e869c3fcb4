"""Processes die at the worst moment; jobs end right all the same, and nothing is left behind."""

from __future__ import annotations

import pytest
from grid_kit import Grid, healthy, run

from vmjobs.model import Job, JobState, ReasonCode

pytestmark = pytest.mark.disruptive

#: Says where it is, and runs long enough to be hit.
SLOW = "#!/bin/sh\necho begun\nsleep 8\necho done > out.txt\n"


def kill(grid: Grid, service: str, pattern: str) -> None:
    """kill -9 of the processes that match, by whatever name the container calls them."""
    grid.on(service, "pkill", "-KILL", "-f", pattern)


def assert_ended_right(grid: Grid, job: Job, attempts: int | None = None) -> None:
    (ended,) = grid.wait(job, timeout=300)
    assert (ended.state, ended.reason.code) == (JobState.COMPLETED, ReasonCode.SUCCEEDED), ended.reason
    assert [o.path for o in ended.outputs] == ["out.txt"]
    if attempts is not None:
        assert ended.attempts == attempts
    grid.assert_clean(job)


def service_of(job: Job) -> str:
    """The compose service of the node a job is on."""
    return job.node.split(".")[0]


@pytest.mark.parametrize("state", [JobState.BOOTING, JobState.RUNNING])
def test_the_agent_is_killed(grid: Grid, state: JobState) -> None:
    (job,) = grid.submit(SLOW, outputs=["out.txt"])
    hit = grid.until(job, state)
    kill(grid, service_of(hit), "vmjobs agent")
    assert_ended_right(grid, job, attempts=2)


def test_the_worker_is_killed(grid: Grid) -> None:
    (job,) = grid.submit(SLOW, outputs=["out.txt"])
    grid.until(job, JobState.RUNNING)
    kill(grid, "worker", "vmjobs worker")
    assert_ended_right(grid, job, attempts=1)


def test_the_worker_is_killed_while_it_submits(grid: Grid) -> None:
    jobs = grid.submit(SLOW, count=3, outputs=["out.txt"])
    kill(grid, "worker", "vmjobs worker")
    for job in jobs:
        assert_ended_right(grid, job, attempts=1)


def test_the_api_is_killed(grid: Grid) -> None:
    (job,) = grid.submit(SLOW, outputs=["out.txt"])
    grid.until(job, JobState.RUNNING)
    kill(grid, "api", "vmjobs serve")
    assert_ended_right(grid, job, attempts=1)


def test_the_node_is_lost(grid: Grid) -> None:
    (job,) = grid.submit(SLOW, outputs=["out.txt"])
    hit = grid.until(job, JobState.RUNNING)
    container = grid.container(service_of(hit))
    run("docker", "kill", "-s", "KILL", container)
    try:
        (ended,) = grid.wait(job, timeout=400)
    finally:
        run("docker", "start", container)
        healthy(container)
    assert ended.state is JobState.COMPLETED, ended.reason
    assert ended.attempts == 2
    assert ended.node != hit.node
    grid.assert_clean(job)
