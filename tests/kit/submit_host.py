"""Shared by tests of transparent jobs: a user's shell at a schedd, and ways to break a VM."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import pytest

from tests.kit.grid import BOOT_SECONDS, PHYSICIST, Grid, wait_for

K = TypeVar("K", bound=Hashable)

#: Seconds for a job's way from the queue to its end.
PATIENT = 240.0
#: The agent's log on its node.
LOG = "/var/log/condor/VMJobsAgentLog"
SUBMIT = """
executable = job.sh
arguments = {arguments}
environment = "GREETING='two words' ODD.NAME=dot"
transfer_input_files = data
output = out
error = err
log = log
should_transfer_files = YES
when_to_transfer_output = ON_EXIT
request_memory = 128
request_disk = 64MB
{more}
"""
#: Requirements that exclude the VMs of other tests' clusters.
ON_A_NODE = "isUndefined(TARGET.VMJobsCluster)"
#: Submit lines that send a job by Condor-C to the site.
BY_CONDOR_C = """
universe = grid
grid_resource = condor site.grid site.grid
+remote_ShouldTransferFiles = "YES"
+remote_WhenToTransferOutput = "ON_EXIT"
"""


@dataclass
class Desk:
    """A physicist's shell on a host with a schedd; its jobs and files are removed at the end."""

    grid: Grid
    host: str
    extra: str = ""
    folder: str = field(default_factory=lambda: f"/run/lock/unchanged-{uuid.uuid4().hex}")
    clusters: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.clusters:
            self("condor_rm", *self.clusters, check=False)
        self("rm", "-rf", self.folder, check=False)

    def __call__(self, *command: str, check: bool = True) -> str:
        return self.grid.on(self.host, *command, user=PHYSICIST, check=check)

    def write(self, name: str, text: str) -> None:
        self("sh", "-c", 'printf %s "$1" >"$2"', "sh", text, f"{self.folder}/{name}")

    def submit(self, script: str, image: str = "generic", arguments: str = "", **more: Any) -> str:
        """Submit a shell script as a job; return its cluster. more: lines of the submit file."""
        self.describe(script, image, arguments, **more)
        return self.tool("condor_submit", "-terse", "job.sub").split(".")[0].strip()

    def tool(self, *command: str) -> str:
        """Run a tool of HTCondor's in the desk's directory, to which submit files are relative."""
        answer = self("sh", "-c", 'cd "$1" && shift && "$@"', "sh", self.folder, *command)
        found = re.search(r"^(\d+)\.|to cluster (\d+)\.", answer, re.MULTILINE)
        if found:
            self.clusters.append(found[1] or found[2])
        return answer

    def describe(
        self,
        script: str,
        image: str = "generic",
        arguments: str = "",
        count: int = 1,
        **more: str,
    ) -> None:
        """Write a submit file for this many jobs."""
        self("mkdir", "-p", self.folder)
        self.write("job.sh", f"#!/bin/sh\n{script}\n")
        self.write("data", "from a file\n")
        lines = [f'+VMJobImage = "{image}"', f"+VMJobBootTimeout = {BOOT_SECONDS}"] if image else []
        lines += [f"{name.replace('__', '+')} = {value}" for name, value in more.items()]
        text = SUBMIT.format(
            arguments=arguments, more="\n".join([*lines, self.extra, f"queue {count}"])
        )
        self.write("job.sub", text)

    def ad(self, cluster: str, *, ended: bool = False) -> dict[str, Any]:
        """The job's ad; empty if there is none (any more)."""
        tool = ["condor_history", "-limit", "1"] if ended else ["condor_q"]
        listed: list[dict[str, Any]] = json.loads(self(*tool, cluster, "-json") or "[]")
        return listed[0] if listed else {}

    def ended(self, cluster: str) -> dict[str, Any]:
        """The job's ad once it has left the queue or is held."""

        def look() -> dict[str, Any] | None:
            ad = self.ad(cluster)
            if ad:
                return ad if ad["JobStatus"] in (4, 5) else None
            return self.ad(cluster, ended=True) or None

        return wait_for(look, f"job {cluster} to end at {self.host}", PATIENT)

    def succeeded(self, cluster: str) -> dict[str, Any]:
        """The job's ad once the job has ended with exit status 0."""
        ad = self.ended(cluster)
        assert (ad["JobStatus"], ad.get("ExitCode")) == (4, 0), ad.get("HoldReason")
        return ad

    def shown(self, cluster: str) -> tuple[str, str]:
        """State and reason, evaluated by HTCondor's tools: they are expressions while it runs."""
        ask = ("-limit", "1", "-af", "ChirpVMState", "ChirpVMReason")
        said = self("condor_q", cluster, *ask).strip() or self("condor_history", cluster, *ask).strip()
        state, _, reason = said.partition(" ")
        return state, reason

    def running(self, cluster: str) -> dict[str, Any]:
        """The job's ad once its VM runs it."""

        def look() -> dict[str, Any] | None:
            ad = self.ad(cluster)
            assert ad.get("JobStatus") != 5, ad["HoldReason"]
            return ad if self.shown(cluster)[0] == "RUNNING" else None

        return wait_for(look, f"job {cluster} to run", PATIENT)

    def read(self, name: str) -> str:
        return self("cat", f"{self.folder}/{name}")

    def changes(self) -> list[str]:
        """Attributes whose changes are events in the job's log, in order."""
        return re.findall(r"(?:Changing|Setting) job attribute (\w+) ", self.read("log"))


#: Lines of a job that is submitted at the site itself, or a hop of Condor-C away, by host.
HOPS = {"site": "", "submit": BY_CONDOR_C}


@pytest.fixture
def site(grid: Grid) -> Iterator[Desk]:
    with Desk(grid, "site") as made:
        yield made


@pytest.fixture(params=HOPS)
def desk(grid: Grid, request: pytest.FixtureRequest) -> Iterator[Desk]:
    """A desk at the site itself, and one a hop of Condor-C away."""
    with Desk(grid, request.param, HOPS[request.param]) as made:
        yield made


@dataclass(frozen=True)
class Kind:
    """A job. before: prepares its directory."""

    script: str
    image: str = "generic"
    arguments: str = ""
    lines: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[Desk], object] = lambda _: None


#: Jobs under way, each with the desk where it was submitted.
Submitted = Mapping[K, tuple[Desk, str]]


@contextmanager
def submitted(wanted: Mapping[K, tuple[Desk, Kind]]) -> Iterator[Submitted[K]]:
    """Submit jobs together, each from a desk of its own."""

    def submit(one: tuple[Desk, Kind]) -> tuple[Desk, str]:
        desk, job = one
        job.before(desk)
        return desk, desk.submit(job.script, job.image, job.arguments, **job.lines)

    with ExitStack() as desks, ThreadPoolExecutor(4) as pool:
        for desk, _ in wanted.values():
            desks.enter_context(desk)
        yield dict(zip(wanted, pool.map(submit, wanted.values()), strict=True))


def at_site(desk: Desk, cluster: str) -> tuple[Desk, str]:
    """The same job in the site's queue, once it runs there."""
    ad = desk.running(cluster)
    while True:
        if "RoutedToJobId" in ad and "RoutedBy" not in ad:
            name, job = "submit.grid", ad["RoutedToJobId"]
        else:
            name, _, job = ad["GridJobId"].split()[1:]
        cluster = job.split(".")[0]
        if name == "site.grid":
            return Desk(desk.grid, "site"), cluster
        ad = desk.ad(cluster)


def where(desk: Desk, cluster: str) -> tuple[str, str]:
    """The node on which a job runs, and the agent's name for the job."""
    node = desk.running(cluster)["RemoteHost"].partition("@")[2].split(".")[0]
    said = f"grep -o 'condor.[0-9]* is job {cluster}.0 of' {LOG}"
    return node, desk.grid.on(node, "sh", "-c", said).splitlines()[-1].split()[0]


def kill_machine(desk: Desk, cluster: str) -> None:
    """Kill the VM of a running job, as a fault of its hypervisor would."""
    node, name = where(desk, cluster)
    listed = desk.grid.on(
        node, "sh", "-c", f"grep -l '\"{name}\"' /var/lib/vmjobs/agent/runs/*/run.json"
    )
    run = listed.splitlines()[0].split("/")[-2]
    desk.grid.on(node, "pkill", "-9", "-f", f"umid=[^ ]*{run}")


def run_dag(desk: Desk) -> None:
    """Run a DAG with scripts around its two jobs; the second uses the first one's output."""
    script = 'if [ "$1" = A ]; then echo of A >made; else cat made; fi; uname -n'
    desk.describe(
        script, arguments="$(node)", transfer_input_files="data $(made)", output="out.$(node)"
    )
    desk.write(
        "graph",
        """
JOB A job.sub
JOB B job.sub
VARS A node="A" made=""
VARS B node="B" made=",made"
PARENT A CHILD B
SCRIPT PRE A /bin/touch before
SCRIPT POST B /bin/touch after
RETRY A 1
""",
    )
    ad = desk.ended(submit_dag(desk))
    assert (ad["JobStatus"], ad["ExitCode"]) == (4, 0), desk.read("graph.dagman.out")[-3000:]
    assert desk.read("out.B").splitlines() == ["of A", "vmjob-0"]
    desk.read("before")
    desk.read("after")


#: True only once the VM reports that it is running.
RUNNING = 'ChirpVMState =?= "RUNNING"'


def rescue_dag(desk: Desk) -> None:
    """Let the second of two jobs fail, repair it, and run the rescue DAG."""
    desk.describe('echo "$1" >>ran; [ "$1" = A ] || [ -e mended ]', arguments="$(node)")
    text = desk.read("job.sub").replace(
        "transfer_input_files = data", "transfer_input_files = $(files)"
    )
    desk.write("job.sub", text.replace("output = out", "output = out.$(node)"))
    graph = """
JOB A job.sub
JOB B job.sub
VARS A node="A" files="data"
VARS B node="B" files="{files}"
PARENT A CHILD B
"""
    desk.write("graph", graph.format(files="data"))
    ad = desk.ended(submit_dag(desk))
    assert (ad["JobStatus"], ad["ExitCode"]) == (4, 1), desk.read("graph.dagman.out")[-3000:]
    assert "DONE A" in desk.read("graph.rescue001")
    desk.write("mended", "")
    desk.write("graph", graph.format(files="data,mended"))
    ad = desk.ended(submit_dag(desk))
    assert (ad["JobStatus"], ad["ExitCode"]) == (4, 0), desk.read("graph.dagman.out")[-3000:]
    submitted = re.findall(r"DAG Node: (\w)", desk.read("log"))
    assert sorted(submitted) == ["A", "B", "B"], "what had succeeded is not run again"


def submit_dag(desk: Desk) -> str:
    """Submit the DAG; return the cluster of DAGMan's own job."""
    told = desk.tool("condor_submit_dag", "graph")
    found = re.search(r"to cluster (\d+)", told)
    assert found is not None, told
    return found[1]


def why(desk: Desk, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(desk("vmjobs", "job", "why", job, "--json"))
    return found


def why_once(desk: Desk, job: str, code: str) -> dict[str, Any]:
    """What ``why`` tells once its first finding has this code: the job may be on its way at first."""

    def look() -> dict[str, Any] | None:
        found = why(desk, job)
        return found if found["findings"][0]["code"] == code else None

    return wait_for(look, f"job {job} at {desk.host} to be {code}", PATIENT)
