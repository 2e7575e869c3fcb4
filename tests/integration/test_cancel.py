"""Cancel a job in each state: it ends CANCELED, and nothing of it is left anywhere."""

from __future__ import annotations

from functools import partial

from tests.kit.grid import ODD, Grid, odd_images, wait_for
from vmjobs.model import Job, JobState

SLEEP = "#!/bin/sh\nsleep 300\n"


def assert_gone(grid: Grid, job: Job) -> None:
    """Assert that the job ends CANCELED and is gone from both schedds and all nodes."""
    (ended,) = grid.wait(job, timeout=120)
    assert ended.state is JobState.CANCELED, ended.reason
    for service in ("submit", "site"):
        look = partial(queued, grid, service, job)
        wait_for(lambda look=look: not look(), f"job {job.id} to leave {service}", 60)  # type: ignore[misc]
    grid.assert_clean(job)


def queued(grid: Grid, service: str, job: Job) -> str:
    wanted = f'VMJobsId == "{job.id}"'
    return grid.on(service, "condor_q", "-allusers", "-constraint", wanted, "-af", "JobStatus").strip()


def test_cancel_while_queued(grid: Grid) -> None:
    # A node has too little memory for two such jobs: of four jobs on two nodes, at least two wait.
    jobs = grid.submit(SLEEP, count=4, memory=3000)
    for job in jobs:
        wait_for(lambda job=job: queued(grid, "site", job), "the job to arrive at the site", 120)  # type: ignore[misc]
    for job in jobs:
        grid.api.cancel(job.id)
    for job in jobs:
        assert_gone(grid, job)
    assert [grid.api.job(job.id).attempts for job in jobs].count(0) >= 2


def test_cancel_on_a_node(grid: Grid) -> None:
    odd_images(grid, {"test-never-ready": ODD["test-never-ready"]})
    (staging,), (running,) = grid.submit(SLEEP), grid.submit(SLEEP)
    (booting,) = grid.submit(SLEEP, image="test-never-ready", boot_seconds=300)
    grid.until(staging, JobState.STAGING, JobState.BOOTING, JobState.RUNNING)
    grid.api.cancel(staging.id)
    grid.until(booting, JobState.BOOTING)
    grid.api.cancel(booting.id)
    assert grid.until(running, JobState.RUNNING).node
    grid.api.cancel(running.id)
    grid.api.cancel(running.id)  # a repeated cancel does no harm
    for job in (staging, booting, running):
        assert_gone(grid, job)
