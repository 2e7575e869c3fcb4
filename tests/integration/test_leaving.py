"""Jobs that have to leave a node, or cannot be reached there, go on on the other one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import step_watch
from faults_kit import silent
from grid_kit import NODES, Grid, run, wait_for
from steps_kit import HERE, WATCH, closed, configured, short_leases
from test_unchanged import PATIENT, Desk

from vmjobs.model import JobState

pytestmark = pytest.mark.disruptive

FIRST, OTHER = "node1", "node2"
#: Runs long enough to be hit.
SLOW = "echo begun; sleep 45; echo done"
#: Runs for longer than anybody waits for a node that is cut off.
LONGER = "echo begun; sleep 1000"


@pytest.fixture
def jobs(grid: Grid) -> Iterator[tuple[Desk, str, str]]:
    """An unchanged job and one of the service on a node: where, which."""
    desk = Desk(grid, "site")
    with closed(grid, OTHER):
        (rest,) = grid.submit(f"#!/bin/sh\n{SLOW}\n")
        cluster = desk.submit(SLOW)
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
    late = "time() - EnteredCurrentActivity > 2"
    text = f"PREEMPT = TARGET.NumJobStarts < 1 && {late}\nMAXJOBRETIREMENTTIME = 0"
    with configured(grid, FIRST, "preempt", text), closed(grid, FIRST):
        assert_went_on(grid, *jobs)


def test_a_node_that_is_cut_off_for_longer_than_the_lease(grid: Grid) -> None:
    """It ends its machine by itself, before the job has another one elsewhere."""
    desk = Desk(grid, "site")
    with ExitStack() as stack:
        for node in NODES:
            stack.enter_context(watched(grid, node))
        stack.enter_context(short_leases(grid))
        with closed(grid, OTHER):
            cluster = desk.submit(LONGER)
            stack.callback(desk, "condor_rm", cluster, check=False)
            desk.running(cluster)
            stack.enter_context(silent(grid, FIRST))
        wait_for(lambda: on_the_other(desk, cluster), "it to run on the other node", PATIENT)
        first, other = (changes(grid, node) for node in (FIRST, OTHER))
    assert len(first[0][1]) == len(other[-1][1]) == 1, "one machine there, and one here now"
    assert first[-1][1] == [], "none is left there"
    assert first[-1][0] < other[0][0], "never two at a time"


def on_the_other(desk: Desk, cluster: str) -> bool | None:
    ad = desk.ad(cluster)
    there = str(ad.get("RemoteHost", "")).endswith(f"@{OTHER}.grid")
    return (there and ad.get("NumJobStarts") == 2 and ad.get("ChirpVMState") == "RUNNING") or None


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
        grid.on(node, "pkill", "-f", WATCH, check=False)
        grid.on(node, "rm", "-f", WATCH, seen)


def changes(grid: Grid, node: str) -> list[tuple[float, list[str]]]:
    """When, in seconds of the epoch, machines began and ended there, and which lived from then on. Both
    nodes have one clock.
    """
    lines = grid.on(node, "cat", str(step_watch.SEEN)).splitlines()
    return [(moment, living) for moment, living in map(json.loads, lines)]
