"""Transparent jobs that reach their node by the job router, by two Condor-C hops, or directly.

Each outcome is checked where the job was submitted. All jobs are submitted together; each test checks
one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.grid import Grid, wait_for
from tests.kit.outcome_rows import JOB_POLICY
from tests.kit.submit_host import (
    PATIENT,
    RUNNING,
    Desk,
    Kind,
    Submitted,
    at_site,
    kill_machine,
    rescue_dag,
    run_dag,
    submitted,
    where,
    why,
    why_once,
)

#: A job of the submit host's own schedd: the job router finds it without any extra lines.
BY_ROUTER = ""
#: To the submit host's schedd as a client, and from there to the site: twice all that one hop does.
BY_TWO_HOPS = """
universe = grid
grid_resource = condor submit.grid submit.grid
remote_universe = grid
remote_grid_resource = condor site.grid site.grid
+remote_remote_JobUniverse = 5
+remote_remote_ShouldTransferFiles = "YES"
+remote_remote_WhenToTransferOutput = "ON_EXIT"
"""
ROUTES = {"router": BY_ROUTER, "two-hops": BY_TWO_HOPS}
#: The routes, and none: jobs of the site's own schedd.
WAYS = {**ROUTES, "site": ""}

FULL = """
    printf '<%s>' "$@"; echo; echo "$GREETING"; cat data; id -un; uname -n
    echo result >made; echo again >>data; echo other >other; echo problem >&2; exit 3
"""
#: Jobs that are sent by each route.
ROUTED = {
    "full": Kind(
        FULL,
        arguments="\"'it''s' 'a  b'\"",
        lines={
            "transfer_output_files": "made,data,other",
            "transfer_output_remaps": '"other=renamed"',
        },
    ),
    "lost": Kind("sleep 1000", lines={"__VMJobMaxStarts": "1"}),
    "removed": Kind("sleep 1000"),
    "large": Kind("true", lines={"request_memory": "999999"}),
    "streams": Kind(
        "echo first; sleep 5; echo last", lines={"stream_output": "true", "stream_error": "true"}
    ),
}
#: Jobs that end by themselves, and what HTCondor then has of them.
ENDS = {
    # These could be mistaken for ends of the VM or of vmjobs.
    "killed": (Kind("kill -KILL $$"), {"ExitBySignal": True, "ExitSignal": 9}),
    "255": (Kind("exit 255"), {"ExitBySignal": False, "ExitCode": 255}),
    # The policy of a job is its own, wherever it goes.
    "max_retries": (Kind("exit 4", lines={"max_retries": "1"}), {"ExitCode": 4, "NumJobStarts": 2}),
    "success_exit_code": (
        Kind("exit 4", lines={"success_exit_code": "4", "max_retries": "3"}),
        {"ExitCode": 4, "NumJobStarts": 1},
    ),
}
#: Jobs that their own policy holds, by the sub-code of the hold.
HOLDS = {
    "77": Kind("exit 4", lines={"on_exit_hold": "ExitCode == 4", "on_exit_hold_subcode": "77"}),
    "88": Kind("sleep 1000", lines={"periodic_hold": RUNNING, "periodic_hold_subcode": "88"}),
}
POLICIES = {
    **HOLDS,
    "periodic_remove": Kind("sleep 1000", lines={"periodic_remove": RUNNING}),
    **{name: job for name, (job, _) in ENDS.items()},
}
#: Long enough for the test to hold it, short enough to wait for its end.
LONG = "sleep 100; echo ran; exit 6"
JOBS = {(way, name): job for way in WAYS for name, job in POLICIES.items()}
JOBS |= {(way, name): job for way in ROUTES for name, job in ROUTED.items()}
JOBS["router", "no image"] = Kind("echo ran", "no-such-image")
Jobs = Submitted[tuple[str, str]]
both = pytest.mark.parametrize("way", ROUTES)
each = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(scope="module")
def jobs(grid: Grid) -> Iterator[Jobs]:
    hosts = {**dict.fromkeys(ROUTES, "submit"), "site": "site"}
    desks = {key: Desk(grid, hosts[key[0]], WAYS[key[0]]) for key in JOBS}
    with submitted({key: (desks[key], job) for key, job in JOBS.items()}) as made:
        yield made


def wait_for_no_machine(grid: Grid, node: str, name: str) -> None:
    runs = f"! grep -q '\"{name}\"' /var/lib/vmjobs/agent/runs/*/run.json && echo gone"
    wait_for(
        lambda: "gone" in grid.on(node, "sh", "-c", runs, check=False) or None,
        "the machine to go",
        PATIENT,
    )


def held(desk: Desk, cluster: str) -> dict[str, Any]:
    """The job's ad once its policy holds it."""
    ad = desk.ended(cluster)
    assert (ad["JobStatus"], ad["HoldReasonCode"]) == (5, JOB_POLICY), ad
    return ad


@both
def test_a_job_that_is_removed_takes_its_vm_along(jobs: Jobs, way: str) -> None:
    desk, cluster = jobs[way, "removed"]
    site, there = at_site(desk, cluster)
    node, name = where(site, there)
    desk("condor_rm", cluster)
    wait_for_no_machine(desk.grid, node, name)
    wait_for(lambda: not site.ad(there) or None, "the site's copy to go", PATIENT)


@both
def test_a_job_whose_vm_dies(jobs: Jobs, way: str) -> None:
    desk, cluster = jobs[way, "lost"]
    kill_machine(*at_site(desk, cluster))
    ad = held(desk, cluster)
    assert ad["HoldReasonSubCode"] == 123
    assert ad["HoldReason"].startswith("GUEST_LOST: ")
    assert "killed from outside" in ad["HoldReason"]


@both
def test_a_job_comes_back_with_all_that_is_its_own(jobs: Jobs, way: str) -> None:
    desk, cluster = jobs[way, "full"]
    ad = desk.ended(cluster)
    assert (ad["JobStatus"], ad.get("ExitCode"), ad["ExitBySignal"]) == (4, 3, False), ad
    assert ad["ChirpVMRunSeconds"] > 0
    out = desk.read("out").splitlines()
    assert out == ["<it's><a  b>", "two words", "from a file", "physicist", "vmjob-0"]
    assert desk.read("err") == "problem\n"
    assert desk.read("made") == "result\n"
    assert desk.read("data") == "from a file\nagain\n"
    assert desk.read("renamed") == "other\n"
    wait_for(lambda: "Job terminated" in desk.read("log"), "the job's end in its log", 60)


@each
@pytest.mark.parametrize("name", ENDS)
def test_a_job_ends_by_itself_in_its_own_way(jobs: Jobs, way: str, name: str) -> None:
    desk, cluster = jobs[way, name]
    ad = desk.ended(cluster)
    _, expected = ENDS[name]
    assert {"JobStatus": 4, **expected} == {key: ad.get(key) for key in ("JobStatus", *expected)}, ad


def test_a_routed_job_is_mended_and_released(jobs: Jobs) -> None:
    """The release must wait until the routed copy is gone, which an edit does not change."""
    desk, cluster = jobs["router", "no image"]
    ad = held(desk, cluster)
    assert ad["HoldReasonSubCode"] == 101
    assert ad["HoldReason"].startswith("NOT_FOUND: ")
    wait_for(lambda: desk.ad(cluster)["Managed"] == "Schedd" or None, "the copy to go", PATIENT)
    desk("condor_qedit", cluster, "VMJobImage", '"generic"')
    desk("condor_release", cluster)
    wait_for(lambda: desk.ad(cluster, ended=True) or None, "the job to end", PATIENT)
    assert desk.ad(cluster, ended=True)["ExitCode"] == 0
    assert desk.read("out") == "ran\n"


@both
def test_why_a_job_waits_at_its_site(jobs: Jobs, way: str) -> None:
    found = why_once(*jobs[way, "large"], "TOO_LARGE")
    assert [place.split()[-1] for place in found["way"]] == ["submit.grid", "submit.grid", "site.grid"]


@each
@pytest.mark.parametrize("subcode", HOLDS)
def test_a_job_is_held_by_its_own_policy(jobs: Jobs, way: str, subcode: str) -> None:
    assert held(*jobs[way, subcode])["HoldReasonSubCode"] == int(subcode)


@each
def test_a_job_is_removed_by_its_own_policy(jobs: Jobs, way: str) -> None:
    desk, cluster = jobs[way, "periodic_remove"]
    ad = wait_for(lambda: desk.ad(cluster, ended=True) or None, "it to be removed", PATIENT)
    assert ad["JobStatus"] == 3
    assert "PeriodicRemove" in ad["RemoveReason"]


@both
def test_what_a_job_would_stream_comes_back(jobs: Jobs, way: str) -> None:
    desk, cluster = jobs[way, "streams"]
    assert desk.ended(cluster)["ExitCode"] == 0
    assert desk.read("out") == "first\nlast\n"


def test_a_job_that_does_not_want_to_be_routed_stays(grid: Grid) -> None:
    with Desk(grid, "submit") as desk:
        cluster = desk.submit("true", __WantJobRouter="false")
        assert "VMJobPolicy" not in desk.ad(cluster)
        assert why(desk, cluster)["findings"][0]["code"] == "NO_POLICY"


@pytest.fixture(params=ROUTES)
def sender(grid: Grid, request: pytest.FixtureRequest) -> Iterator[Desk]:
    with Desk(grid, "submit", ROUTES[request.param]) as desk:
        yield desk


@pytest.mark.soak
def test_a_job_that_its_user_holds_and_releases(sender: Desk) -> None:
    cluster = sender.submit(LONG)
    node, name = where(*at_site(sender, cluster))
    sender("condor_hold", cluster)
    wait_for_no_machine(sender.grid, node, name)
    wait_for(lambda: sender.ad(cluster).get("Managed") != "External" or None, "its copy to go", PATIENT)
    assert sender.ad(cluster)["JobStatus"] == 5
    sender("condor_release", cluster)
    ad = wait_for(lambda: sender.ad(cluster, ended=True) or None, "it to end", PATIENT + 100)
    assert (ad["JobStatus"], ad["ExitCode"], ad["NumHolds"]) == (4, 6, 1)
    assert sender.read("out") == "ran\n"


@pytest.mark.soak
def test_a_job_that_its_policy_holds_and_releases(sender: Desk) -> None:
    """The job router allows the release only once the routed copy is gone."""
    cluster = sender.submit(
        LONG,
        periodic_hold=f"{RUNNING} && (NumHolds ?: 0) < 1",
        periodic_hold_subcode="88",
        periodic_release='HoldReasonSubCode == 88 && Managed =!= "External"',
    )
    ad = wait_for(lambda: sender.ad(cluster, ended=True) or None, "it to end", 2 * PATIENT)
    assert (ad["JobStatus"], ad["ExitCode"], ad["NumHolds"]) == (4, 6, 1)
    assert sender.read("out") == "ran\n"


@pytest.mark.soak
def test_a_dag_of_jobs_that_leave(sender: Desk) -> None:
    run_dag(sender)


@pytest.mark.soak
def test_the_rescue_of_a_dag_of_jobs_that_leave(sender: Desk) -> None:
    rescue_dag(sender)
