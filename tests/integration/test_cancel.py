"""Cancel a job in each state: it ends CANCELED, and nothing of it is left anywhere."""

from __future__ import annotations

from functools import partial

import pytest

from tests.kit.grid import Grid, odd_images, wait_for
from vmjobs.errors import Conflict
from vmjobs.model import Job, JobState

SLEEP = "#!/bin/sh\nsleep 300\n"
IDLE = "1"  # JobStatus, HTCondor manual: Job ClassAd Attributes


def has_left(grid: Grid, service: str, job: Job) -> bool:
    return not queued(grid, service, job)


def assert_gone(grid: Grid, job: Job) -> None:
    """Assert that the job ends CANCELED and is gone from both schedds and all nodes."""
    (ended,) = grid.wait(job, timeout=120)
    assert ended.state is JobState.CANCELED, ended.reason
    for service in ("submit", "site"):
        wait_for(
            partial(has_left, grid, service, job),
            f"job {job.id} to leave the queue of {service}",
            60,
        )
    assert grid.leftovers(job) == []


def queued(grid: Grid, service: str, job: Job) -> str:
    wanted = f'VMJobsId == "{job.id}"'
    return grid.on(service, "condor_q", "-allusers", "-constraint", wanted, "-af", "JobStatus").strip()


def test_cancel_while_queued(grid: Grid) -> None:
    # No node has so much memory, so the job waits, whatever jobs of other tests do.
    (job,) = grid.submit(SLEEP, memory=100_000)
    wait_for(lambda: queued(grid, "site", job) == IDLE, "the job to wait at the site", 120)
    grid.api.cancel(job.id)
    assert_gone(grid, job)
    assert grid.api.job(job.id).attempts == 0


def test_cancel_while_staging(grid: Grid) -> None:
    (job,) = grid.submit(SLEEP)
    grid.until(job, JobState.STAGING, JobState.BOOTING, JobState.RUNNING)
    grid.api.cancel(job.id)
    assert_gone(grid, job)


def test_cancel_while_booting(grid: Grid) -> None:
    odd_images(grid)
    (job,) = grid.submit(SLEEP, image="test-never-ready", boot_seconds=300)
    grid.until(job, JobState.BOOTING)
    grid.api.cancel(job.id)
    assert_gone(grid, job)


def test_cancel_while_running(grid: Grid) -> None:
    (job,) = grid.submit(SLEEP)
    running = grid.until(job, JobState.RUNNING)
    assert running.node
    grid.api.cancel(job.id)
    grid.api.cancel(job.id)  # a repeated cancel does no harm
    assert_gone(grid, job)


def test_a_job_that_has_ended_cannot_be_canceled(grid: Grid) -> None:
    (job,) = grid.submit("#!/bin/sh\ntrue\n")
    grid.wait(job)
    with pytest.raises(Conflict):
        grid.api.cancel(job.id)
