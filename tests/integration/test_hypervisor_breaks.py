"""A hypervisor that stops working on one node of two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from grid_kit import Grid, blank_disk, publish, wait_for
from steps_kit import closed
from test_unchanged import PATIENT, Desk
from test_why import why

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


def test_an_image_goes_where_something_boots_it(grid: Grid) -> None:
    """What boots it is known once a node has looked."""
    image = blank_disk(grid)
    publish(grid)
    desk = Desk(grid, "site")
    with broken(grid):
        with closed(grid, SOUND):
            cluster = desk.submit("true", image=image, __VMJobBootTimeout="4", request_memory="192")
            ad = wait_for(lambda: idle(desk, cluster), "the job to be idle again", PATIENT)
            assert ad["ChirpVMReason"].startswith("NO_HYPERVISOR: ")
            assert (ad["ChirpVMImageNamed"], ad["ChirpVMImageKinds"]) == (image, "kvm,qemu")
            wait_for(lambda: "qemu" not in offered(grid) or None, "it to be offered no more", PATIENT)
            wait_for(lambda: lacking(desk, cluster) or None, "it to be known to lack that", PATIENT)
        ad = desk.ended(cluster)
        assert ad["HoldReason"].startswith("BOOT_TIMED_OUT: ")
        assert (ad["NumJobStarts"], ad["ChirpVMNode"]) == (2, f"{SOUND}.grid")
    desk("condor_rm", cluster)


def lacking(desk: Desk, cluster: str) -> bool:
    """Whether the broken node does not have what boots the job's image, as far as the pool knows."""
    of_image = [c for c in why(desk, cluster).get("clauses", []) if "ChirpVMImageKinds" in c["text"]]
    return any(f"{BROKEN}.grid" in c["nodes"]["names"] for c in of_image)


def idle(desk: Desk, cluster: str) -> dict[str, Any] | None:
    """The job's ad if it waits, having been begun."""
    ad = desk.ad(cluster)
    return ad if ad.get("JobStatus") == 1 and ad.get("NumJobStarts") else None
