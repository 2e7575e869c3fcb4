"""Node health from the outcomes of its jobs, and what happens to later jobs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kit.faults import fill, small_disk
from tests.kit.grid import NODES, Grid, wait_for
from tests.kit.steps import closed
from tests.kit.submit_host import PATIENT, Desk
from vmjobs.model import JobState, ReasonCode

pytestmark = pytest.mark.disruptive

BROKEN, SOUND = "node1", "node2"
RESTS = "several jobs in a row failed because of the node"


def ad_of(grid: Grid, node: str) -> dict[str, Any]:
    wanted = "HasVMJobs,VMJobsFault,VMJobsImageNames"
    asked = ("condor_status", f"slot1@{node}.grid", "-json", "-attributes", wanted)
    found: list[dict[str, Any]] = json.loads(grid.on("site", *asked) or "[]")
    return found[0] if found else {}


def resting(grid: Grid, node: str) -> dict[str, Any] | None:
    """The ad of a node's agent while it says why the node rests."""
    ad = ad_of(grid, node)
    return ad if ad.get("VMJobsFault") else None


def test_a_node_that_fails_its_jobs_rests_and_they_go_elsewhere(grid: Grid) -> None:
    desk = Desk(grid, "site")
    with small_disk(grid, BROKEN, "runs", 1024) as runs:
        filler = fill(grid, BROKEN, runs)
        with closed(grid, SOUND):
            jobs = grid.submit("echo done", 3)
            rests = wait_for(lambda: resting(grid, BROKEN), "it to rest", PATIENT)
            told = "3 jobs in a row failed because of this node; it takes no jobs "
            assert rests["VMJobsFault"].startswith(told)
            assert rests["HasVMJobs"] is False
            cluster = desk.submit("echo done", request_memory="128")

            def explained() -> bool:
                found = json.loads(desk("vmjobs", "job", "why", cluster, "--json"))["findings"]
                return any(f"on {BROKEN}.grid {RESTS}" in finding["message"] for finding in found)

            # A rest may be over before this asks; the next one is longer.
            wait_for(lambda: explained() or None, "it to be explained", PATIENT)
            announced = f"{BROKEN}.grid"
            wait_for(lambda: grid.api.node(announced).fault or None, "the service to know", PATIENT)
        ends = grid.wait(*jobs)
        assert {(job.state, job.node) for job in ends} == {(JobState.COMPLETED, f"{SOUND}.grid")}
        assert max(job.attempts for job in ends) > 1
        events = [event for job in ends for event in grid.api.events(job.id)]
        back = [event.reason for event in events if event.state is JobState.PREEMPTED]
        assert {reason.code for reason in back} == {ReasonCode.NODE_FAILED}
        assert all("No space left on device; it is run again, up to " in r.message for r in back)
        desk.ended(cluster)
        grid.on(BROKEN, "rm", filler)
    wait_for(lambda: ad_of(grid, BROKEN).get("HasVMJobs") is True, "its rest to be over", PATIENT)
    assert ad_of(grid, BROKEN)["VMJobsFault"] == ""


@pytest.mark.soak
def test_a_job_that_comes_back_is_not_driven_out_by_the_next_one(grid: Grid) -> None:
    """The job's own rank, not the node's, prefers another node."""
    desk = Desk(grid, "site")
    with closed(grid, SOUND):
        cluster = desk.submit("sleep 8", on_exit_remove="NumJobStarts >= 2", request_memory="128")

        def came_back() -> str | None:
            ad = desk.ad(cluster)
            if ad.get("NumShadowStarts", 0) < 2 or "RemoteHost" not in ad:
                return None
            asked = ("condor_status", "-direct", f"{BROKEN}.grid", str(ad["RemoteHost"]))
            return grid.on(BROKEN, *asked, "-af", "CurrentRank").strip() or None

        assert wait_for(came_back, "it to run there again", PATIENT) == "0.0"
        desk.ended(cluster)


def test_a_job_goes_where_its_image_is_by_the_name_that_it_uses(grid: Grid) -> None:
    """Jobs of other tests do not use this image name."""
    desk, image = Desk(grid, "site"), "library/generic:latest"

    def ran_on() -> str:
        ad = desk.ended(desk.submit("true", image, request_memory="128"))
        assert ad["JobStatus"] == 4, ad.get("HoldReason")
        return str(ad["LastRemoteHost"]).rpartition("@")[2].removesuffix(".grid")

    def has(node: str) -> bool:
        return image in ad_of(grid, node).get("VMJobsImageNames", "").split(",")

    assert not any(map(has, NODES)), "no job has used the name before"
    first = ran_on()
    wait_for(lambda: has(first) or None, f"{first} to tell of the image's name", PATIENT)
    assert [ran_on(), ran_on()] == [first, first]
