"""A hypervisor that stops working on one node of two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from grid_kit import Grid, wait_for
from steps_kit import closed
from test_unchanged import PATIENT, Desk

pytestmark = pytest.mark.disruptive

BROKEN, SOUND = "node1", "node2"
PROGRAM = "/usr/bin/qemu-img"


@contextmanager
def broken(grid: Grid) -> Iterator[None]:
    """Without a program that qemu's machines need; the agent finds it again when it starts."""
    before = offered(grid)
    assert "qemu" in before
    grid.on(BROKEN, "mv", PROGRAM, f"{PROGRAM}.away")
    try:
        yield
    finally:
        grid.on(BROKEN, "mv", f"{PROGRAM}.away", PROGRAM)
        grid.on(BROKEN, "pkill", "-TERM", "-f", "vmjobs [a]gent")
        wait_for(lambda: offered(grid) == before or None, "the node to be as it was", 120)


def offered(grid: Grid) -> set[str]:
    """The hypervisors that the node's ad has."""
    asked = ("condor_status", f"slot1@{BROKEN}.grid", "-af", "VMJobsHypervisors")
    return set(grid.on("site", *asked, check=False).strip().split(","))


def test_jobs_go_where_it_works(grid: Grid) -> None:
    desk = Desk(grid, "site")
    with broken(grid):
        with closed(grid, SOUND):
            cluster = desk.submit("uname -n", __VMJobHypervisor='"qemu"', request_memory="192")
            wait_for(lambda: "qemu" not in offered(grid) or None, "it to be offered no more", PATIENT)
            ad = wait_for(lambda: idle(desk, cluster), "the job to be idle again", PATIENT)
            assert ad["ChirpVMReason"].startswith("NO_HYPERVISOR: ")
            assert ad["NumJobStarts"] == 1
        ad = desk.ended(cluster)
        assert (ad["JobStatus"], ad.get("ExitCode")) == (4, 0), ad.get("HoldReason")
        assert ad["NumJobStarts"] == 2
        assert ad["LastRemoteHost"].endswith(f"@{SOUND}.grid")


def idle(desk: Desk, cluster: str) -> dict[str, object] | None:
    """The job's ad if it waits, having been begun."""
    ad = desk.ad(cluster)
    return ad if ad.get("JobStatus") == 1 and ad.get("NumJobStarts") else None
