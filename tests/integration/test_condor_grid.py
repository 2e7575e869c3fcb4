"""The scheduler on a real grid: a submit host, a site, execute nodes, and Condor-C.

The grid is the compose project ``VMJOBS_GRID``, or the containers named in
``VMJOBS_TEST_SUBMIT``, ``VMJOBS_TEST_SITE`` and ``VMJOBS_TEST_NODES``.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.kit import ROOT
from tests.kit.waiting import wait_until

IMAGE = "sha256:" + "5" * 64
SPEC = {"image": IMAGE, "script": "#!/bin/sh\n", "memory": 64, "disk": 8, "route": "site"}
CHIRP = (
    "PYTHONPATH={code} python3 -c 'from condor.node.chirp import ChirpReporter as R; "
    'R().publish(dict(ChirpVMState="BOOTING", '
    'ChirpVMReason="a \\"b\\" \\\\ \\n" + 2 * chr(36) + "(X) é\\" + X + \\"", '
    "ChirpVMBootSeconds=1.5))'"
)


def docker(*arguments: str, data: str = "", check: bool = True) -> str:
    done = subprocess.run(
        ["docker", *arguments], input=data, capture_output=True, text=True, timeout=180, check=False
    )
    if check:
        assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def container(service: str) -> str:
    wanted = os.environ.get(f"VMJOBS_TEST_{service.upper()}")
    if wanted:
        return wanted
    project = os.environ["VMJOBS_GRID"]
    labels = (f"com.docker.compose.project={project}", f"com.docker.compose.service={service}")
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    return docker("ps", "--quiet", *filters).strip()


@dataclass
class Grid:
    """The containers of the daemons, and calls to the scheduler under test inside ``submit``."""

    submit: str
    site: str
    nodes: Sequence[str]
    code: str
    arrays: list[tuple[str, str]] = field(default_factory=list)

    def run(self, where: str, *arguments: str, user: str = "vmjobs", data: str = "") -> str:
        return docker("exec", "-i", "-u", user, where, *arguments, data=data)

    def name(self, where: str) -> str:
        return self.run(where, "hostname", "-f").strip()

    def raw(self, verb: str, where: str = "", **request: Any) -> tuple[int, str]:
        where = where or self.submit
        site = self.name(self.site)
        config = {
            "spool_dir": "/var/lib/vmjobs/spool",
            "schedd_name": self.name(where),
            "routes": {"site": f"condor {site} {site}"},
            **request.pop("config", {}),
        }
        driver = f"{self.code}/condor_driver.py"
        environment = ("-e", f"PYTHONPATH={self.code}", "-e", "PYTHONDONTWRITEBYTECODE=1")
        done = subprocess.run(
            ["docker", "exec", "-i", "-u", "vmjobs", *environment, where, "python3", driver],
            input=json.dumps({"verb": verb, "config": config, **request}),
            capture_output=True,
            text=True,
            timeout=180,
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

    def new_array(self, where: str = "") -> str:
        array = f"t{uuid.uuid4().hex[:12]}"
        self.arrays.append((where or self.submit, array))
        return array


@pytest.fixture(scope="module")
def grid() -> Iterator[Grid]:
    if not container("submit") or not container("site"):
        pytest.fail("no grid to test: no containers of its submit side and its site; run `make grid`")
    nodes = os.environ.get("VMJOBS_TEST_NODES", "").split() or [container(f"node{i}") for i in (1, 2)]
    found = Grid(container("submit"), container("site"), nodes, f"/tmp/vmjobs-{uuid.uuid4().hex[:8]}")  # noqa: S108
    offers = ("condor_status", "-constraint", "HasVMJobs", "-af", "Name")
    wait_until(lambda: found.run(found.site, *offers).strip(), 120)
    places = dict.fromkeys([found.submit, found.site, *found.nodes])
    for place in places:
        docker("exec", place, "mkdir", found.code)
        for part in ("vmjobs", "condor", "tests/kit/condor_driver.py"):
            docker("cp", str(ROOT / part), f"{place}:{found.code}/")
        docker("exec", place, "chmod", "-R", "a+rX", found.code)
    yield found
    for place, array in found.arrays:
        docker("exec", place, "condor_rm", "-constraint", f'VMJobsArray == "{array}"', check=False)
        found.call("forget", array=array, where=place)
    for place in places:
        docker("exec", place, "rm", "-rf", found.code)


def statuses(history: list[dict[str, Any]]) -> list[str]:
    found: list[str] = []
    for observation in history:
        if not found or found[-1] != observation["status"]:
            found.append(observation["status"])
    return found


#: An occasional observer may miss that a job was idle, but sees states in order.
IN_ORDER = (["idle", "running", "completed"], ["running", "completed"], ["completed"])


def test_a_job_goes_to_the_site_and_its_exit_code_comes_back(grid: Grid) -> None:
    array = grid.new_array()
    command = CHIRP.format(code=grid.code) + "; cat job.token; sleep 6; exit 7"
    refs = grid.call("submit", array=array, count=2, spec=SPEC, command=command)
    job = f"{array}-0"
    constraint = f'VMJobsId == "{job}"'
    attributes = ("ChirpVMState", "ChirpVMReason", "ChirpVMBootSeconds")

    def mirrored() -> list[str] | None:  # HTCondor mirrors one attribute after the other
        rows = grid.queue(grid.submit, constraint, *attributes)
        return rows[0] if rows and "undefined" not in rows[0] else None

    assert wait_until(mirrored) == ["BOOTING", 'a "b" /  $ $(X) é" + X + "', "1.5"]
    history = grid.call("watch", array=array, until=["completed"])
    assert set(history) == set(refs)
    # This watch began when the job ran; it learns the earlier states from the log.
    again = history[job]
    assert statuses(again) in IN_ORDER
    assert again[-1]["status"] == "completed"
    assert (again[-1]["exit_code"], again[-1]["exit_signal"]) == (7, None)
    assert again[-1]["ref"]["grid_job_id"].startswith("condor ")
    assert again[-1]["ref"]["cluster"] == refs[job]["cluster"]
    assert grid.call("read", path=f"{array}/{job}/exec.out") == "token-0"

    asked = wait_until(lambda: _all(grid, [job], "completed"))
    assert asked[0]["exit_code"] == 7


def _all(grid: Grid, jobs: list[str], status: str) -> list[dict[str, Any]]:
    found = grid.call("query", job_ids=jobs)
    return found if all(o["status"] == status for o in found) else []


def test_what_its_node_could_not_run_to_an_end_is_run_again(grid: Grid) -> None:
    array = grid.new_array()
    starts = "$(sed -n 's/^NumJobStarts = //p' \"$_CONDOR_JOB_AD\")"
    command = f"sleep 2; [ {starts} -ge 1 ] && exit 4; sh -c 'kill -9 $PPID'"
    grid.call("submit", array=array, count=1, spec=SPEC, command=command)
    history = grid.call("watch", array=array, until=["completed"])[f"{array}-0"]
    assert (history[-1]["exit_code"], history[-1]["exit_signal"]) == (4, None)


def test_the_sites_own_pool_is_a_route_too(grid: Grid) -> None:
    array = grid.new_array(grid.site)
    spec = {**SPEC, "route": "local"}
    local = {"where": grid.site, "config": {"schedd_name": ""}}
    grid.call("submit", array=array, count=1, spec=spec, command="sleep 5; exit 3", **local)
    history = grid.call("watch", array=array, until=["completed"], **local)[f"{array}-0"]
    assert statuses(history) in IN_ORDER
    assert history[-1]["exit_code"] == 3
    grid.arrays.remove((grid.site, array))
    grid.call("forget", array=array, **local)
    assert grid.call("watch", array=array, until=["idle"], seconds=0, **local) == {}


def test_a_removed_job_is_gone_at_both_schedds(grid: Grid) -> None:
    array = grid.new_array()
    refs = grid.call("submit", array=array, count=1, spec=SPEC, command="sleep 300")
    job = f"{array}-0"
    grid.call("watch", array=array, until=["running"])
    constraint = f'VMJobsId == "{job}"'
    assert grid.queue(grid.site, constraint, "JobStatus") == [["2"]]
    started = time.monotonic()
    grid.call(
        "remove", refs=[*refs.values(), {"schedd": "x", "cluster": 999999, "proc": 0}], why="no\nlonger"
    )
    history = grid.call("watch", array=array, until=["removed"])[job]
    assert history[-1]["status"] == "removed"
    assert history[-1]["reason"].startswith("no longer")
    wait_until(lambda: not grid.queue(grid.site, constraint, "JobStatus"))
    print(  # noqa: T201
        f"removed at both schedds after {time.monotonic() - started:.1f} s"
    )
    assert wait_until(lambda: _all(grid, [job], "removed"))
    grid.call("remove", refs=list(refs.values()), why="again")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_submission_that_was_cut_short_is_completed_once(grid: Grid, when: str) -> None:
    array = grid.new_array()
    spec = {**SPEC, "cpus": 256}  # matches nothing, so it stays in the queue
    status, _ = grid.raw("submit", array=array, count=3, spec=spec, die=when)
    assert status == 9
    constraint = f'VMJobsArray == "{array}"'
    queued = grid.queue(grid.submit, constraint, "VMJobsId", "ClusterId", "ProcId")
    assert len(queued) == (3 if when == "after" else 0)
    refs = grid.call("submit", array=array, count=3, spec=spec)
    again = grid.call("submit", array=array, count=4, spec=spec)
    assert again == {
        **again,
        **{job: {**ref, "grid_job_id": again[job]["grid_job_id"]} for job, ref in refs.items()},
    }
    rows = grid.queue(grid.submit, constraint, "VMJobsId", "ClusterId", "ProcId")
    assert len(rows) == 4
    expected = {(job, str(ref["cluster"]), str(ref["proc"])) for job, ref in again.items()}
    assert {tuple(row) for row in rows} == expected
    assert {tuple(row) for row in queued} <= expected


def test_a_hold_at_the_site_shows_here_with_its_reason(grid: Grid) -> None:
    array = grid.new_array()
    first = "grep -q '^NumShadowStarts = 1$' $_CONDOR_JOB_AD"
    grid.call("submit", array=array, count=1, spec=SPEC, command=f"{first} && sleep 600; exit 5")
    job = f"{array}-0"
    constraint = f'VMJobsId == "{job}"'
    grid.call("watch", array=array, until=["running"])
    grid.run(grid.site, "condor_hold", "-constraint", constraint, "-reason", "the disk is full")
    history = grid.call("watch", array=array, until=["held"])[job]
    assert history[-1]["status"] == "held"
    assert "the disk is full" in history[-1]["reason"]
    assert wait_until(lambda: _all(grid, [job], "held"))[0]["reason"] == history[-1]["reason"]
    grid.run(grid.submit, "condor_release", "-constraint", constraint)
    history = grid.call("watch", array=array, until=["completed"])[job]
    assert history[-1]["exit_code"] == 5


def test_a_schedd_that_does_not_exist_is_unavailable(grid: Grid) -> None:
    answer = grid.call("query", job_ids=["a"], config={"schedd_name": "nobody.grid"})
    assert (answer["error"], answer["service"]) == ("Unavailable", "schedd")
    assert "nobody.grid" in answer["message"]


def test_a_schedd_that_does_not_listen_is_unavailable(grid: Grid) -> None:
    """Its ad remains, as after a crash. This kills the bindings' history call."""
    ad = grid.run(grid.submit, "condor_status", "-schedd", "-long", user="root")
    lines = [
        line
        for line in ad.split("\n\n")[0].splitlines()
        if not line.startswith(("Name ", "MyAddress ", "ScheddIpAddr "))
    ]
    name = f"dead-{uuid.uuid4().hex[:8]}.grid"
    lines += [f'Name = "{name}"', 'MyAddress = "<127.0.0.1:9>"']
    grid.run(
        grid.submit,
        "condor_advertise",
        "UPDATE_SCHEDD_AD",
        "-",
        user="root",
        data="\n".join(lines) + "\n",
    )
    spec, refs = {**SPEC}, [{"schedd": name, "cluster": 1, "proc": 0}]
    requests: list[dict[str, Any]] = [
        {"verb": "query", "job_ids": ["a"]},
        {"verb": "history"},
        {"verb": "remove", "refs": refs, "why": "x"},
        {"verb": "submit", "array": grid.new_array(), "count": 1, "spec": spec},
    ]
    try:
        for request in requests:
            answer = grid.call(request.pop("verb"), config={"schedd_name": name}, **request)
            assert (answer["error"], answer["service"]) == ("Unavailable", "schedd"), request
            assert name in answer["message"]
    finally:
        stale = f'MyType = "Query"\nTargetType = "Scheduler"\nRequirements = Name == "{name}"\n'
        grid.run(grid.submit, "condor_advertise", "INVALIDATE_SCHEDD_ADS", "-", user="root", data=stale)


@pytest.mark.disruptive
def test_a_schedd_that_hangs_does_not_hang_us(grid: Grid) -> None:
    find = "grep -lx condor_schedd /proc/[0-9]*/comm"
    pid = grid.run(grid.submit, "sh", "-c", find, user="root").split("/")[2]
    array = grid.new_array()
    grid.run(grid.submit, "sh", "-c", f"kill -STOP {pid}", user="root")
    try:
        answer = grid.call("submit", array=array, count=1, spec=SPEC, timeout=2.0)
    finally:
        grid.run(grid.submit, "sh", "-c", f"kill -CONT {pid}", user="root")
    assert (answer["error"], answer["service"]) == ("Unavailable", "schedd")
    assert "within 2 s" in answer["message"]
    # It is unknown whether the schedd accepted that submission; a repetition settles it.
    refs = grid.call("submit", array=array, count=1, spec={**SPEC})
    rows = grid.queue(grid.submit, f'VMJobsArray == "{array}"', "ClusterId")
    assert rows == [[str(refs[f"{array}-0"]["cluster"])]]
