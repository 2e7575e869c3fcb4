"""Virtual clusters on the grid: declared by an operator, used by HTCondor users, deleted."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
from grid_kit import NODES, PATIENCE, PHYSICIST, Grid, wait_for

from vmjobs.client import Client
from vmjobs.client.transport import Retries
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.vm_state import ClusterVmState
from vmjobs.cluster.wire import Cluster
from vmjobs.errors import Conflict, NotFound

#: Seconds in which two VMs boot, join and are probed on a busy host.
UP_SECONDS = 240.0


@pytest.fixture(scope="session")
def operator(grid: Grid) -> Iterator[Client]:
    token = grid.admin_token.read_text("ascii").strip()
    with Client(grid.url, token, retries=Retries(deadline=15.0 * PATIENCE)) as api:
        yield api


@pytest.fixture
def name(grid: Grid, operator: Client) -> Iterator[str]:
    """A cluster name; the cluster is deleted afterwards if it exists."""
    name = f"t{uuid.uuid4().hex[:8]}"
    yield name
    delete(operator, name)


def delete(operator: Client, name: str) -> None:
    """Delete a cluster if it exists, and wait until it is gone."""
    try:
        operator.clusters.delete(name, "now")
    except (NotFound, Conflict):
        return
    wait_for(lambda: gone(operator, name) or None, f"cluster {name} to go", 120)


def gone(operator: Client, name: str) -> bool:
    try:
        operator.clusters.get(name)
    except NotFound:
        return True
    return False


def up(operator: Client, name: str, size: int) -> Cluster:
    """Wait until exactly this many VMs are up."""

    def look() -> Cluster | None:
        cluster = operator.clusters.get(name)
        states = [member.state for member in cluster.members]
        return cluster if states == [ClusterVmState.UP] * size else None

    try:
        return wait_for(look, f"{size} machines to be up", UP_SECONDS)
    except AssertionError as late:
        told = [f"{e.member} {e.state} {e.code} {e.message}" for e in operator.clusters.events(name)]
        raise AssertionError(f"{late}: {told}") from late


#: Submit description of a job that goes by Condor-C to the site, for VMs of virtual clusters.
DESCRIPTION = """
universe = grid
grid_resource = condor site.grid site.grid
executable = /bin/sh
transfer_executable = false
arguments = "-c '{script}'"
initialdir = {folder}
transfer_input_files = {inputs}
output = out.{node}
should_transfer_files = YES
when_to_transfer_output = ON_EXIT
request_memory = {memory}
request_disk = 1024
+remote_Requirements = {requirements}
+remote_JobLeaseDuration = {lease}
+remote_ShouldTransferFiles = "YES"
+remote_WhenToTransferOutput = "ON_EXIT"
"""
#: Two jobs read the output of a first one; a fourth reads theirs.
DIAMOND = """
JOB A node.sub
JOB B node.sub
JOB C node.sub
JOB D node.sub
VARS A script="seq 1 10" inputs=""
VARS B script="grep -c [02468] out.A" inputs="out.A"
VARS C script="grep -c 1 out.A" inputs="out.A"
VARS D script="hostname; cat out.B out.C" inputs="out.B,out.C"
PARENT A CHILD B C
PARENT B C CHILD D
"""


class Submitter:
    """A physicist at the submit host, with HTCondor's own tools."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.folder = f"/home/{PHYSICIST}/{uuid.uuid4().hex}"
        self("mkdir", self.folder)

    def __call__(self, *command: str, check: bool = True) -> str:
        return self.grid.on("submit", *command, user=PHYSICIST, check=check)

    def submit(self, cluster: str, script: str, lease: int = 300) -> str:
        """Submit by Condor-C to the site, for VMs of one virtual cluster."""
        return self.submit_where(f'TARGET.VirtualCluster == "{cluster}"', script, lease)

    def submit_where(self, requirements: str, script: str, lease: int = 300, memory: int = 64) -> str:
        """Submit by Condor-C to the site, with these requirements.

        lease: seconds that the job waits for a VM that stopped answering. memory: MiB.
        """
        text = DESCRIPTION.format(
            script=script,
            folder=self.folder,
            node="$(Cluster)",
            inputs="",
            requirements=requirements,
            lease=lease,
            memory=memory,
        )
        text += "log = log\nqueue\n"
        return self("sh", "-c", 'printf "%s" "$1" | condor_submit -terse -', "-", text).split(".")[0]

    def submit_dag(self, cluster: str, graph: str) -> str:
        """Submit a DAG to DAGMan; its nodes define the variables ``script`` and ``inputs``."""
        text = DESCRIPTION.format(
            script="$(script)",
            folder=self.folder,
            node="$(JOB)",
            inputs="$(inputs)",
            requirements=f'TARGET.VirtualCluster == "{cluster}"',
            lease=300,
            memory=64,
        )
        for name, content in {"node.sub": text + "queue\n", "graph.dag": graph}.items():
            self("sh", "-c", 'printf "%s" "$1" >"$2"', "-", content, f"{self.folder}/{name}")
        run_there = "cd $1 && condor_submit_dag -notification never graph.dag"
        said = self("sh", "-c", run_there, "-", self.folder)
        return said.rpartition("submitted to cluster ")[2].partition(".")[0]

    def status(self, job: str) -> str:
        return self("condor_q", job, "-af", "JobStatus").strip()

    def output(self, job: str, timeout: float = 120) -> str:
        wait_for(lambda: not self.status(job) or None, f"job {job} to leave the queue", timeout)
        return self("cat", f"{self.folder}/out.{job}")

    def starts(self, job: str) -> int:
        """How often the site started a job that has ended."""
        remote = self("condor_history", job, "-limit", "1", "-af", "GridJobId").split()[-1]

        def look() -> str:
            # A job that has ended stays in the site's queue for a while.
            queued = self.grid.on("site", "condor_q", remote, "-af", "NumShadowStarts")
            return queued or self.grid.on("site", "condor_history", remote, "-af", "NumShadowStarts")

        return int(wait_for(look, f"the site to tell of job {remote}", 30))


def machines(grid: Grid, name: str) -> list[str]:
    """All traces of cluster VMs on the nodes, and of this cluster's VMs in the pool."""
    found = grid.on("site", "condor_status", "-constraint", f'VMJobsCluster == "{name}"', "-af", "Name")
    left = [f"collector: {line}" for line in found.splitlines()]
    for node in NODES:
        journals = grid.on(
            node, "find", "/var/lib/vmjobs/agent/members", "-mindepth", "1", "-maxdepth", "1"
        )
        left += [f"{node}: {line}" for line in journals.splitlines()]
    return left


def test_a_cluster_runs_jobs_of_the_pool_and_leaves_nothing(
    grid: Grid, operator: Client, name: str
) -> None:
    spec = ClusterSpec(
        name=name, image="worker", size=2, memory=512, disk=512, attributes={"Flavour": "strange"}
    )
    assert operator.clusters.put(spec).outcome == "created"
    assert operator.clusters.put(spec).outcome == "unchanged"
    cluster = up(operator, name, 2)
    members = {member.name: member for member in cluster.members}
    assert set(members) == {f"{name}-0", f"{name}-1"}
    assert {member.node for member in cluster.members} == {f"{node}.grid" for node in NODES}

    user = Submitter(grid)
    jobs = [
        user.submit(name, "hostname; . /etc/os-release; echo $PRETTY_NAME; id -u; sleep 3")
        for _ in "12"
    ]
    for job in jobs:
        host, system, uid = user.output(job).splitlines()
        assert host in {f"{member}.vc" for member in members}
        assert system == "Debian GNU/Linux 13 (trixie)"
        assert int(uid) > 0

    # A drain lets running jobs end, keeps later ones waiting, and removes the VMs.
    running = user.submit(name, "sleep 10; echo to the end")
    wait_for(lambda: user.status(running) == "2" or None, "the job to run", 60)
    operator.clusters.drain(name)
    late = user.submit(name, "echo never")
    assert user.output(running) == "to the end\n"
    wait_for(lambda: not operator.clusters.get(name).members or None, "all machines to go", 120)
    assert user.status(late) in {"1", "2"}  # idle at the site; HTCondor may not have reported it yet
    user("condor_rm", late)
    operator.clusters.delete(name)
    wait_for(lambda: gone(operator, name) or None, "the cluster to go", 60)
    wait_for(
        lambda: not [m for m in machines(grid, name) if name in m] or None, "nothing to be left", 60
    )


@pytest.mark.soak
def test_a_dag_runs_in_a_cluster(grid: Grid, operator: Client, name: str) -> None:
    operator.clusters.put(ClusterSpec(name=name, image="worker", size=1, memory=512, disk=512))
    up(operator, name, 1)
    user = Submitter(grid)
    dag = user.submit_dag(name, DIAMOND)
    wait_for(lambda: not user.status(dag) or None, "the graph to be done", 300)
    assert user("condor_history", dag, "-limit", "1", "-af", "ExitCode").strip() == "0"
    assert user("cat", f"{user.folder}/out.D").splitlines() == [f"{name}-0.vc", "5", "2"]


def test_a_machine_that_is_killed_comes_back_under_its_name(
    grid: Grid, operator: Client, name: str
) -> None:
    spec = ClusterSpec(name=name, image="worker", size=1, memory=512, disk=512)
    operator.clusters.put(spec)
    (before,) = up(operator, name, 1).members
    user = Submitter(grid)
    job = user.submit(name, "hostname; sleep 10; echo done", lease=20)
    wait_for(lambda: user.status(job) == "2" or None, "the job to run", 60)
    node = before.node.removesuffix(".grid")
    grid.on(node, "pkill", "-KILL", "-f", f"umid=vmjobs-[^ ]*{before.id}-")

    def back() -> Cluster | None:
        found = operator.clusters.get(name)
        (member,) = found.members
        again = member.incarnation > before.incarnation and member.state is ClusterVmState.UP
        return found if again else None

    (after,) = wait_for(back, "another machine of the same name", UP_SECONDS).members
    assert (after.name, after.id, after.node) == (before.name, before.id, before.node)
    assert user.output(job).splitlines() == [f"{before.name}.vc", "done"]  # in the new VM


def test_an_operator_logs_in_and_a_job_cannot(grid: Grid, operator: Client, name: str) -> None:
    """Login uses a way that only the VM's root can open; a job can see it but not use it."""
    spec = ClusterSpec(name=name, image="worker", size=1, memory=512, disk=512)
    operator.clusters.put(spec)
    up(operator, name, 1)
    token = str(grid.admin_token)
    environ = {**os.environ, "VMJOBS_API_URL": grid.url, "VMJOBS_TOKEN_FILE": token}

    def ssh(command: str) -> tuple[str, int]:
        argv = [sys.executable, "-c", "from vmjobs.cli.main import main; main()"]
        done = subprocess.run(
            [*argv, "cluster", "ssh", f"{name}-0", "--", command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=120,
            text=True,
            check=False,
        )
        return done.stdout, done.returncode

    assert ssh("hostname; id -u") == (f"{name}-0.vc\n0\n", 0)
    assert ssh("pgrep -c condor_startd; exit 7") == ("1\n", 7)
    user = Submitter(grid)
    secrets = "/run/vmjobs/job/job.env /run/vmjobs-door/key"
    job = user.submit(name, f"cat {secrets} 2>/dev/null; echo $?; ls /run/vmjobs-door; echo $?")
    assert user.output(job) == "1\n2\n"
    assert ssh(f"cat {secrets} >/dev/null") == ("", 0)
    told = [e.message for e in operator.clusters.events(name) if e.code == "LOGIN"]
    assert len(told) == 3
