"""What dies beside the steps of a run (test_every_step.py): jobs end right all the same."""

from __future__ import annotations

import pytest
from grid_kit import Grid, healthy, run

from vmjobs.model import Job, JobState, ReasonCode

pytestmark = pytest.mark.disruptive

#: Says where it is, and runs long enough to be hit.
SLOW = "#!/bin/sh\necho begun\nsleep 8\necho done > out.txt\n"


def assert_ended_right(grid: Grid, job: Job) -> None:
    (ended,) = grid.wait(job, timeout=300)
    assert (ended.state, ended.reason.code) == (JobState.COMPLETED, ReasonCode.SUCCEEDED), ended.reason
    assert [o.path for o in ended.outputs] == ["out.txt"]
    assert ended.attempts == 1
    grid.assert_clean(job)


def service_of(job: Job) -> str:
    """The compose service of the node a job is on."""
    return job.node.split(".")[0]


def test_the_worker_is_killed_while_it_submits(grid: Grid) -> None:
    jobs = grid.submit(SLOW, count=3, outputs=["out.txt"])
    grid.on("worker", "pkill", "-KILL", "-f", "vmjobs worker")
    for job in jobs:
        assert_ended_right(grid, job)


@pytest.mark.soak
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
