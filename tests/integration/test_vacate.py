"""Jobs that are evicted from a node, or unreachable there, continue on the other node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.kit.faults import AGENT, silent
from tests.kit.grid import Grid, wait_for
from tests.kit.steps import closed, short_leases
from tests.kit.submit_host import PATIENT, Desk
from vmjobs.model import JobState

pytestmark = [pytest.mark.disruptive, pytest.mark.soak]

FIRST, OTHER = "node1", "node2"
#: Ends only on the second node.
HANGS = f"""echo begun; grep -q 'Machine = "{FIRST}' .machine.ad && sleep 1000; sleep 5; echo done"""
#: Runs long enough for a fault to hit it.
SLOW = "echo begun; sleep 45; echo done"


@pytest.fixture
def jobs(grid: Grid) -> Iterator[tuple[Desk, str, str]]:
    """A transparent job and one of the service, both on FIRST: desk, cluster, job id."""
    with Desk(grid, "site") as desk:
        with closed(grid, OTHER):
            (rest,) = grid.submit(f"#!/bin/sh\n{SLOW}\n")
            cluster = desk.submit(SLOW)
            desk.running(cluster)
            grid.until(rest, JobState.RUNNING, timeout=PATIENT)
        yield desk, cluster, rest.id


def assert_went_on(grid: Grid, desk: Desk, cluster: str, rest: str) -> None:
    """Assert that both jobs ended well on the other node, at their second start."""
    ad = desk.succeeded(cluster)
    assert (ad["NumJobStarts"], ad["LastRemoteHost"].rpartition("@")[2]) == (2, f"{OTHER}.grid")
    assert desk.read("out") == "begun\ndone\n"
    (ended,) = grid.wait(grid.api.job(rest), timeout=PATIENT)
    assert (ended.state, ended.attempts) == (JobState.COMPLETED, 2), ended.reason
    assert ended.node.split(".")[0] == OTHER
    grid.assert_clean(ended)


def test_a_node_is_drained(grid: Grid, jobs: tuple[Desk, str, str]) -> None:
    try:
        grid.on("site", "condor_drain", "-graceful", f"{FIRST}.grid")
        assert_went_on(grid, *jobs)
    finally:
        grid.on("site", "condor_drain", "-cancel", f"{FIRST}.grid", check=False)


def test_a_node_that_is_cut_off_for_longer_than_the_lease(grid: Grid) -> None:
    """The job restarts on the other node and ends; then nothing of its first start is left."""
    with short_leases(grid), Desk(grid, "site") as desk:
        with ExitStack() as stack:
            with closed(grid, OTHER):
                cluster = desk.submit(HANGS)
                desk.running(cluster)
                stack.enter_context(silent(grid, FIRST))
            ad = desk.succeeded(cluster)
            started = ad["NumJobStarts"], ad["LastRemoteHost"].rpartition("@")[2]
            assert started == (2, f"{OTHER}.grid")
        wait_for(lambda: not runs(grid) or None, "the first node to have nothing left of it", PATIENT)
        assert desk.read("out") == "begun\ndone\n"
        assert desk.read("log").count(f"005 ({int(cluster):03d}.") == 1


def runs(grid: Grid) -> str:
    """Directories that HTCondor and the agent have for jobs on the first node."""
    places = (f"{AGENT}/runs", "/var/lib/condor/execute")
    return grid.on(FIRST, "find", *places, "-mindepth", "1", "-maxdepth", "1")
