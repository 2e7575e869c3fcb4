"""Crashes that test_every_step.py does not cover: jobs still end correctly."""

from __future__ import annotations

from functools import partial

import pytest

from tests.kit.faults import lost
from tests.kit.grid import Grid, wait_for
from tests.kit.submit_host import PATIENT, Desk
from vmjobs.model import JobState, ReasonCode

pytestmark = pytest.mark.disruptive

#: Faults of a schedd that has jobs.
RESTART = ("condor_restart", "-schedd")
KILL = ("pkill", "-KILL", "-f", "^condor_shadow|^condor_schedd")
#: Runs long enough for a fault to hit it.
SLOW = "#!/bin/sh\necho begun\nsleep 8\necho done > out.txt\n"


def was_found(desk: Desk, times: int) -> bool:
    """Whether the schedd has found the job again as often."""
    return desk.read("log").count("\n023 (") == times


def test_the_worker_is_killed_while_it_submits(grid: Grid) -> None:
    jobs = grid.submit(SLOW, count=3, outputs=["out.txt"])
    # The container ends with the worker, and pkill may end with the container.
    grid.on("worker", "pkill", "-KILL", "-f", "vmjobs worker", check=False)
    for job in grid.wait(*jobs):
        assert (job.state, job.reason.code) == (JobState.COMPLETED, ReasonCode.SUCCEEDED), job.reason
        assert [o.path for o in job.outputs] == ["out.txt"]
        assert job.attempts == 1
    grid.assert_clean(*jobs)


@pytest.mark.soak
def test_the_node_is_lost(grid: Grid) -> None:
    (job,) = grid.submit(SLOW, outputs=["out.txt"])
    hit = grid.until(job, JobState.RUNNING)
    with lost(grid, hit.node.split(".")[0]):
        (ended,) = grid.wait(job, timeout=400)
    assert ended.state is JobState.COMPLETED, ended.reason
    assert ended.attempts == 2
    assert ended.node != hit.node
    grid.assert_clean(job)


@pytest.mark.soak
def test_a_schedd_finds_its_jobs_again(grid: Grid) -> None:
    """The schedd restarts, then dies together with its shadows as when its host fails."""
    with Desk(grid, "site") as desk:
        cluster = desk.submit("n=0; while [ $n -lt 60 ]; do n=$((n + 1)); echo $n; sleep 0.5; done")
        desk.running(cluster)
        for found, deed in enumerate((RESTART, KILL), 1):
            grid.on("site", *deed)
            wait_for(
                partial(was_found, desk, found),
                f"the job to be found again after {deed}",
                PATIENT,
            )
        desk.succeeded(cluster)
        assert desk.read("log").count("\n001 (") == 1, "it was begun once"
        assert desk.read("out").split() == [str(n) for n in range(1, 61)]
