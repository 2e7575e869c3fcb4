"""A hypervisor that stops working on one of two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.kit.faults import without_agent
from tests.kit.grid import Grid, blank_disk, publish, wait_for
from tests.kit.steps import closed
from tests.kit.submit_host import PATIENT, Desk, why

pytestmark = pytest.mark.disruptive

BROKEN, SOUND = "node1", "node2"
#: A program that VMs of each hypervisor need.
PROGRAMS = {"qemu": "/usr/bin/qemu-img", "uml": "/usr/lib/vmjobs/vmjobs/kernel/linux.uml"}
#: Replacements for UML's kernel: one never starts; one reports that it is up but boots nothing.
SLEEPS = "#!/bin/sh\nexec sleep 1000\n"
HANGS = """#!/usr/bin/python3 -IS
import socket, sys, time
print("a kernel that hangs", flush=True)
if "--version" not in sys.argv:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"up", "notify")
    time.sleep(1000)
"""


@contextmanager
def broken(grid: Grid, kind: str = "qemu", instead: str = "") -> Iterator[set[str]]:
    """Take away a program that a hypervisor's VMs need; yield the node's other hypervisors.

    Afterwards the program returns, and the agent restarts to find it. instead: a replacement program.
    """
    program = PROGRAMS[kind]
    # The agent may just have been replaced by a new one.
    before = wait_for(
        lambda: found if kind in (found := offered(grid)) else None, f"it to offer {kind}", 120
    )
    grid.on(BROKEN, "mv", program, f"{program}.away")
    try:
        if instead:
            put = 'printf %s "$1" >"$2" && chmod 755 "$2"'
            grid.on(BROKEN, "sh", "-c", put, "sh", instead, program)
        yield before - {kind}
    finally:
        grid.on(BROKEN, "mv", f"{program}.away", program)
        grid.on(BROKEN, "pkill", "-TERM", "-f", "vmjobs [a]gent")
        wait_for(lambda: offered(grid) == before or None, "the node to be as it was", 120)


def offered(grid: Grid) -> set[str]:
    asked = ("condor_status", f"slot1@{BROKEN}.grid", "-af", "VMJobsHypervisors")
    return set(grid.on("site", *asked, check=False).strip().split(","))


@pytest.mark.soak
def test_jobs_go_where_it_works(grid: Grid) -> None:
    """The agent waits two minutes for a kernel to come up."""
    with Desk(grid, "site") as desk, broken(grid, "uml", SLEEPS) as others:
        with closed(grid, SOUND):
            cluster = desk.submit("uname -n", __VMJobHypervisor='"uml"', request_memory="192")
            wait_for(lambda: offered(grid) == others or None, "it to be offered no more", PATIENT)
            ad = wait_for(lambda: idle(desk, cluster), "the job to be idle again", PATIENT)
            assert ad["ChirpVMReason"].startswith("NO_HYPERVISOR: ")
            assert ad["NumJobStarts"] == 1
        ad = desk.succeeded(cluster)
        assert ad["NumJobStarts"] == 2
        assert ad["LastRemoteHost"].endswith(f"@{SOUND}.grid")


@pytest.mark.soak
def test_one_that_hangs_its_guests_is_found_out(grid: Grid) -> None:
    """A single hang could be the image's fault; after three in a row the agent runs its probe."""
    with without_agent(grid, BROKEN):
        pass  # restarts the agent, which then has counted no failed boots
    wish = {"__VMJobHypervisor": '"uml"', "__VMJobBootTimeout": "5"}
    with Desk(grid, "site") as desk, broken(grid, "uml", HANGS) as others:
        with closed(grid, SOUND):
            for cluster in [desk.submit("uname -n", **wish) for _ in range(3)]:
                ad = desk.ended(cluster)
                assert ad["JobStatus"] == 5, ad
                assert ad["HoldReason"].startswith("BOOT_TIMED_OUT: "), ad["HoldReason"]
                assert ad["HoldReason"].endswith("a kernel that hangs"), ad["HoldReason"]
                assert (ad["NumJobStarts"], ad["ChirpVMNode"]) == (1, f"{BROKEN}.grid")
            wait_for(lambda: offered(grid) == others or None, "it to be offered no more", PATIENT)
            fourth = desk.submit("uname -n", **wish | {"__VMJobBootTimeout": "120"})
        ad = desk.succeeded(fourth)
        assert (ad["NumJobStarts"], ad["ChirpVMNode"]) == (1, f"{SOUND}.grid")


def test_an_image_goes_where_something_boots_it(grid: Grid) -> None:
    """The hypervisors that boot an image are known once a node has inspected it."""
    image = blank_disk(grid)
    publish(grid)
    with Desk(grid, "site") as desk, broken(grid):
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


def lacking(desk: Desk, cluster: str) -> bool:
    """Whether the pool knows that the broken node lacks a hypervisor for the job's image."""
    of_image = [c for c in why(desk, cluster).get("clauses", []) if "ChirpVMImageKinds" in c["text"]]
    return any(f"{BROKEN}.grid" in c["nodes"]["names"] for c in of_image)


def idle(desk: Desk, cluster: str) -> dict[str, Any] | None:
    """The job's ad if it is idle after having started."""
    ad = desk.ad(cluster)
    return ad if ad.get("JobStatus") == 1 and ad.get("NumJobStarts") else None
