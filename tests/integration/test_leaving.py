"""Jobs that have to leave a node, or cannot be reached there, go on on the other one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import step_watch
from faults_kit import silent
from grid_kit import NODES, Grid, run
from steps_kit import HERE, LEASE, WATCH, closed, configured, short_leases
from test_unchanged import PATIENT, Desk

from vmjobs.model import JobState

pytestmark = pytest.mark.disruptive

FIRST, OTHER = "node1", "node2"
#: Runs long enough to be hit, and knows by itself when.
SLOW = "echo begun; n=0; while [ $n -lt 40 ]; do n=$((n + 1)); sleep 0.5; done; echo done"


@pytest.fixture
def jobs(grid: Grid) -> Iterator[tuple[Desk, str, str]]:
    """An unchanged job and one of the service on a node: where, which."""
    desk = Desk(grid, "site")
    with closed(grid, OTHER):
        cluster = desk.submit(SLOW, __TestLeaves="true")
        (rest,) = grid.submit(f"#!/bin/sh\n{SLOW}\n")
        desk.running(cluster)
        grid.until(rest, JobState.RUNNING, timeout=PATIENT)
    yield desk, cluster, rest.id
    desk("condor_rm", cluster, check=False)


def assert_went_on(grid: Grid, desk: Desk, cluster: str, rest: str) -> None:
    """Both ended well on the other node, having been begun twice."""
    ad = desk.ended(cluster)
    assert (ad["JobStatus"], ad.get("ExitCode")) == (4, 0), ad.get("HoldReason")
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


def test_the_node_prefers_to_be_without_them(grid: Grid, jobs: tuple[Desk, str, str]) -> None:
    """Preemption: by what a node's owner has set."""
    text = "PREEMPT = TARGET.NumJobStarts < 1 && ActivityTimer > 2\nMAXJOBRETIREMENTTIME = 0"
    with configured(grid, FIRST, "preempt", text), closed(grid, FIRST):
        assert_went_on(grid, *jobs)


def test_a_node_that_is_cut_off_for_longer_than_the_lease(grid: Grid) -> None:
    """It ends its machines by itself before others begin: no job has two at a time."""
    desk = Desk(grid, "site")
    with ExitStack() as stack:
        for node in NODES:
            stack.enter_context(watched(grid, node))
        stack.enter_context(short_leases(grid))
        with closed(grid, OTHER):
            cluster = desk.submit(SLOW)
            desk.running(cluster)
            stack.enter_context(silent(grid, FIRST))
            cut = time.monotonic()
        ad = desk.ended(cluster)
        assert (ad["JobStatus"], ad.get("ExitCode")) == (4, 0), ad.get("HoldReason")
        assert time.monotonic() - cut > LEASE
        first, other = (lives(grid, node) for node in (FIRST, OTHER))
    assert ad["LastRemoteHost"].endswith(f"@{OTHER}.grid")
    assert desk.read("out") == "begun\ndone\n"
    assert first, "it had a machine on the first node"
    assert other, "and one on the other"
    assert max(first) < min(other), "never two at a time"


@contextmanager
def watched(grid: Grid, node: str) -> Iterator[None]:
    """Have it noted which machines live on a node."""
    seen = str(step_watch.SEEN)
    run("docker", "cp", str(HERE / "step_watch.py"), f"{grid.container(node)}:{WATCH}")
    grid.on(node, "rm", "-f", seen)
    run("docker", "exec", "-d", grid.container(node), "python3", WATCH)
    try:
        yield
    finally:
        grid.on(node, "sh", "-c", f"pkill -f {WATCH}; rm -f {WATCH} {seen}")


def lives(grid: Grid, node: str) -> list[float]:
    """When, in seconds of the epoch, machines began and ended there. Both nodes have one clock."""
    lines = grid.on(node, "sh", "-c", f"cat {step_watch.SEEN} 2>/dev/null; true").splitlines()
    seen = [json.loads(line) for line in lines]
    assert not seen or seen[-1][1] == [], "it has ended"
    return [moment for moment, _ in seen]
