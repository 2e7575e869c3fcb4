"""The scheduler on a real grid: a submit host, a site, execute nodes, and Condor-C."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.kit import ROOT
from tests.kit.grid import NODES, Grid, run
from tests.kit.waiting import wait_until

IMAGE = "sha256:" + "5" * 64
SPEC = {"image": IMAGE, "script": "#!/bin/sh\n", "memory": 64, "disk": 8, "route": "site"}
CHIRP = (
    "PYTHONPATH={code} python3 -c 'from condor.node.chirp import ChirpReporter as R; "
    'R().publish(dict(ChirpVMState="BOOTING", '
    'ChirpVMReason="a \\"b\\" \\\\ \\n" + 2 * chr(36) + "(X) é\\" + X + \\"", '
    "ChirpVMBootSeconds=1.5))'"
)


@dataclass
class Scheduler:
    """Calls to the scheduler under test on the hosts of a grid."""

    grid: Grid
    code: str
    arrays: list[tuple[str, str]] = field(default_factory=list)

    def run(self, where: str, *arguments: str, user: str = "vmjobs") -> str:
        return self.grid.on(where, *arguments, user=user)

    def raw(self, verb: str, where: str = "submit", **request: Any) -> tuple[int, str]:
        config = {
            "spool_dir": "/var/lib/vmjobs/spool",
            "schedd_name": f"{where}.grid",
            "routes": {"site": "condor site.grid site.grid"},
            **request.pop("config", {}),
        }
        environment = ("-e", f"PYTHONPATH={self.code}", "-e", "PYTHONDONTWRITEBYTECODE=1")
        enter = ("docker", "exec", "-i", "-u", "vmjobs", *environment, self.grid.container(where))
        done = subprocess.run(
            [*enter, "python3", f"{self.code}/condor_driver.py"],
            input=json.dumps({"verb": verb, "config": config, **request}),
            capture_output=True,
            text=True,
            timeout=450,
            check=False,
        )
        return done.returncode, done.stdout or done.stderr

    def call(self, verb: str, **request: Any) -> Any:
        status, text = self.raw(verb, **request)
        assert status == 0, text
        return json.loads(text)["answer"]

    def queue(self, where: str, constraint: str, *attributes: str) -> list[list[str]]:
        text = self.run(where, "condor_q", "-all", "-constraint", constraint, "-af:t", *attributes)
        return [line.split("\t") for line in text.splitlines()]

    def new_array(self, where: str = "submit") -> str:
        array = f"t{uuid.uuid4().hex[:12]}"
        self.arrays.append((where, array))
        return array


@pytest.fixture(scope="module")
def scheduler(grid: Grid) -> Iterator[Scheduler]:
    found = Scheduler(grid, f"/tmp/vmjobs-{uuid.uuid4().hex[:8]}")  # noqa: S108
    offers = ("condor_status", "-constraint", "HasVMJobs", "-af", "Name")
    wait_until(lambda: found.run("site", *offers).strip(), 120, "nodes that run VMs")
    places = ("submit", "site", *NODES)
    for place in places:
        grid.on(place, "mkdir", found.code)
        for part in ("vmjobs", "condor", "tests/kit/condor_driver.py"):
            run("docker", "cp", str(ROOT / part), f"{grid.container(place)}:{found.code}/")
        grid.on(place, "chmod", "-R", "a+rX", found.code)
    yield found
    for place, array in found.arrays:
        grid.on(place, "condor_rm", "-constraint", f'VMJobsArray == "{array}"', check=False)
        found.call("forget", array=array, where=place)
    for place in places:
        grid.on(place, "rm", "-rf", found.code)


def statuses(history: list[dict[str, Any]]) -> list[str]:
    found: list[str] = []
    for observation in history:
        if not found or found[-1] != observation["status"]:
            found.append(observation["status"])
    return found


#: An occasional observer may miss that a job was idle, but sees states in order.
IN_ORDER = (["idle", "running", "completed"], ["running", "completed"], ["completed"])


#: Calls to the scheduler at the site itself, for its own pool.
LOCAL: dict[str, Any] = {"where": "site", "config": {"schedd_name": ""}}


@pytest.fixture(scope="module")
def early(scheduler: Scheduler) -> tuple[str, str]:
    """Two arrays that run while the first test waits: one that fails at first, and a local one."""
    again, local = scheduler.new_array(), scheduler.new_array("site")
    starts = "$(sed -n 's/^NumJobStarts = //p' \"$_CONDOR_JOB_AD\")"
    command = f"sleep 2; [ {starts} -ge 1 ] && exit 4; sh -c 'kill -9 $PPID'"
    scheduler.call("submit", array=again, count=1, spec=SPEC, command=command)
    spec = {**SPEC, "route": "local"}
    scheduler.call("submit", array=local, count=1, spec=spec, command="sleep 5; exit 3", **LOCAL)
    return again, local


@pytest.mark.usefixtures("early")
def test_a_job_goes_to_the_site_and_its_exit_code_comes_back(scheduler: Scheduler) -> None:
    array = scheduler.new_array()
    command = CHIRP.format(code=scheduler.code) + "; cat job.token; sleep 6; exit 7"
    refs = scheduler.call("submit", array=array, count=2, spec=SPEC, command=command)
    job = f"{array}-0"
    constraint = f'VMJobsId == "{job}"'
    attributes = ("ChirpVMState", "ChirpVMReason", "ChirpVMBootSeconds")

    def mirrored() -> list[str] | None:  # HTCondor mirrors one attribute after the other
        rows = scheduler.queue("submit", constraint, *attributes)
        return rows[0] if rows and "undefined" not in rows[0] else None

    assert wait_until(mirrored) == ["BOOTING", 'a "b" /  $ $(X) é" + X + "', "1.5"]
    history = scheduler.call("watch", array=array, until=["completed"])
    assert set(history) == set(refs)
    # This watch began when the job ran; it learns the earlier states from the log.
    again = history[job]
    assert statuses(again) in IN_ORDER
    assert again[-1]["status"] == "completed"
    assert (again[-1]["exit_code"], again[-1]["exit_signal"]) == (7, None)
    assert again[-1]["ref"]["grid_job_id"].startswith("condor ")
    assert again[-1]["ref"]["cluster"] == refs[job]["cluster"]
    assert scheduler.call("read", path=f"{array}/{job}/exec.out") == "token-0"

    asked = wait_until(lambda: _all(scheduler, [job], "completed"))
    assert asked[0]["exit_code"] == 7


def _all(scheduler: Scheduler, jobs: list[str], status: str) -> list[dict[str, Any]]:
    found = scheduler.call("query", job_ids=jobs)
    return found if all(o["status"] == status for o in found) else []


def test_what_its_node_could_not_run_to_an_end_is_run_again(
    scheduler: Scheduler, early: tuple[str, str]
) -> None:
    array, _ = early
    history = scheduler.call("watch", array=array, until=["completed"])[f"{array}-0"]
    assert (history[-1]["exit_code"], history[-1]["exit_signal"]) == (4, None)


def test_the_sites_own_pool_is_a_route_too(scheduler: Scheduler, early: tuple[str, str]) -> None:
    _, array = early
    history = scheduler.call("watch", array=array, until=["completed"], **LOCAL)[f"{array}-0"]
    assert statuses(history) in IN_ORDER
    assert history[-1]["exit_code"] == 3
    scheduler.arrays.remove(("site", array))
    scheduler.call("forget", array=array, **LOCAL)
    assert scheduler.call("watch", array=array, until=["idle"], seconds=0, **LOCAL) == {}


def test_a_removed_job_is_gone_at_both_schedds(scheduler: Scheduler) -> None:
    array = scheduler.new_array()
    refs = scheduler.call("submit", array=array, count=1, spec=SPEC, command="sleep 300")
    job = f"{array}-0"
    scheduler.call("watch", array=array, until=["running"])
    constraint = f'VMJobsId == "{job}"'
    assert scheduler.queue("site", constraint, "JobStatus") == [["2"]]
    scheduler.call(
        "remove", refs=[*refs.values(), {"schedd": "x", "cluster": 999999, "proc": 0}], why="no\nlonger"
    )
    history = scheduler.call("watch", array=array, until=["removed"])[job]
    assert history[-1]["status"] == "removed"
    assert history[-1]["reason"].startswith("no longer")
    wait_until(lambda: not scheduler.queue("site", constraint, "JobStatus"))
    assert wait_until(lambda: _all(scheduler, [job], "removed"))
    scheduler.call("remove", refs=list(refs.values()), why="again")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_submission_that_was_cut_short_is_completed_once(scheduler: Scheduler, when: str) -> None:
    array = scheduler.new_array()
    spec = {**SPEC, "cpus": 256}  # matches nothing, so it stays in the queue
    status, _ = scheduler.raw("submit", array=array, count=3, spec=spec, die=when)
    assert status == 9
    constraint = f'VMJobsArray == "{array}"'
    queued = scheduler.queue("submit", constraint, "VMJobsId", "ClusterId", "ProcId")
    assert len(queued) == (3 if when == "after" else 0)
    refs = scheduler.call("submit", array=array, count=3, spec=spec)
    again = scheduler.call("submit", array=array, count=4, spec=spec)
    assert again == {
        **again,
        **{job: {**ref, "grid_job_id": again[job]["grid_job_id"]} for job, ref in refs.items()},
    }
    rows = scheduler.queue("submit", constraint, "VMJobsId", "ClusterId", "ProcId")
    assert len(rows) == 4
    expected = {(job, str(ref["cluster"]), str(ref["proc"])) for job, ref in again.items()}
    assert {tuple(row) for row in rows} == expected
    assert {tuple(row) for row in queued} <= expected


def test_a_hold_at_the_site_shows_here_with_its_reason(scheduler: Scheduler) -> None:
    array = scheduler.new_array()
    first = "grep -q '^NumShadowStarts = 1$' $_CONDOR_JOB_AD"
    scheduler.call("submit", array=array, count=1, spec=SPEC, command=f"{first} && sleep 600; exit 5")
    job = f"{array}-0"
    constraint = f'VMJobsId == "{job}"'
    scheduler.call("watch", array=array, until=["running"])
    scheduler.run("site", "condor_hold", "-constraint", constraint, "-reason", "the disk is full")
    history = scheduler.call("watch", array=array, until=["held"])[job]
    assert history[-1]["status"] == "held"
    assert "the disk is full" in history[-1]["reason"]
    assert wait_until(lambda: _all(scheduler, [job], "held"))[0]["reason"] == history[-1]["reason"]
    scheduler.run("submit", "condor_release", "-constraint", constraint)
    history = scheduler.call("watch", array=array, until=["completed"])[job]
    assert history[-1]["exit_code"] == 5


def test_a_schedd_that_does_not_exist_is_unavailable(scheduler: Scheduler) -> None:
    answer = scheduler.call("query", job_ids=["a"], config={"schedd_name": "nobody.grid"})
    assert (answer["error"], answer["service"]) == ("Unavailable", "schedd")
    assert "nobody.grid" in answer["message"]


def test_a_schedd_that_does_not_listen_is_unavailable(scheduler: Scheduler) -> None:
    """Its ad remains, as after a crash. This kills the bindings' history call."""
    ad = scheduler.run("submit", "condor_status", "-schedd", "-long", user="root")
    lines = [
        line
        for line in ad.split("\n\n")[0].splitlines()
        if not line.startswith(("Name ", "MyAddress ", "ScheddIpAddr "))
    ]
    name = f"dead-{uuid.uuid4().hex[:8]}.grid"
    lines += [f'Name = "{name}"', 'MyAddress = "<127.0.0.1:9>"']

    def advertise(command: str, text: str) -> None:
        send = 'printf "%s\\n" "$2" | condor_advertise "$1" -'
        scheduler.run("submit", "sh", "-c", send, "-", command, text, user="root")

    advertise("UPDATE_SCHEDD_AD", "\n".join(lines))
    spec, refs = {**SPEC}, [{"schedd": name, "cluster": 1, "proc": 0}]
    requests: list[dict[str, Any]] = [
        {"verb": "query", "job_ids": ["a"]},
        {"verb": "history"},
        {"verb": "remove", "refs": refs, "why": "x"},
        {"verb": "submit", "array": scheduler.new_array(), "count": 1, "spec": spec},
    ]
    try:
        for request in requests:
            answer = scheduler.call(request.pop("verb"), config={"schedd_name": name}, **request)
            assert (answer["error"], answer["service"]) == ("Unavailable", "schedd"), request
            assert name in answer["message"]
    finally:
        stale = f'MyType = "Query"\nTargetType = "Scheduler"\nRequirements = Name == "{name}"'
        advertise("INVALIDATE_SCHEDD_ADS", stale)


@pytest.mark.disruptive
def test_a_schedd_that_hangs_does_not_hang_us(scheduler: Scheduler) -> None:
    find = "grep -lx condor_schedd /proc/[0-9]*/comm"
    pid = scheduler.run("submit", "sh", "-c", find, user="root").split("/")[2]
    array = scheduler.new_array()
    scheduler.run("submit", "sh", "-c", f"kill -STOP {pid}", user="root")
    try:
        answer = scheduler.call("submit", array=array, count=1, spec=SPEC, timeout=2.0)
    finally:
        scheduler.run("submit", "sh", "-c", f"kill -CONT {pid}", user="root")
    assert (answer["error"], answer["service"]) == ("Unavailable", "schedd")
    assert "within 2 s" in answer["message"]
    # It is unknown whether the schedd accepted that submission; a repetition settles it.
    refs = scheduler.call("submit", array=array, count=1, spec={**SPEC})
    rows = scheduler.queue("submit", f'VMJobsArray == "{array}"', "ClusterId")
    assert rows == [[str(refs[f"{array}-0"]["cluster"])]]
