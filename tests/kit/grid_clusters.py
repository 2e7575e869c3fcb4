"""Virtual clusters on the grid, and the users whose jobs run in them."""

from __future__ import annotations

import uuid

from tests.kit.grid import NODES, PHYSICIST, Grid, wait_for
from vmjobs.client import Client
from vmjobs.cluster.vm_state import ClusterVmState
from vmjobs.cluster.wire import Cluster
from vmjobs.errors import Conflict, NotFound

#: Seconds in which two VMs boot, join and are probed on a busy host.
UP_SECONDS = 240.0


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
        states = [vm.state for vm in cluster.members]
        return cluster if states == [ClusterVmState.UP] * size else None

    try:
        return wait_for(look, f"{size} VMs to be up", UP_SECONDS)
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
        text = self._description(script, requirements, lease=lease, memory=memory)
        text += "log = log\nqueue\n"
        return self("sh", "-c", 'printf "%s" "$1" | condor_submit -terse -', "-", text).split(".")[0]

    def submit_dag(self, cluster: str, graph: str) -> str:
        """Submit a DAG to DAGMan; its nodes define the variables ``script`` and ``inputs``."""
        where = f'TARGET.VirtualCluster == "{cluster}"'
        text = self._description("$(script)", where, node="$(JOB)", inputs="$(inputs)")
        for name, content in {"node.sub": text + "queue\n", "graph.dag": graph}.items():
            self("sh", "-c", 'printf "%s" "$1" >"$2"', "-", content, f"{self.folder}/{name}")
        run_there = "cd $1 && condor_submit_dag -notification never graph.dag"
        said = self("sh", "-c", run_there, "-", self.folder)
        return said.rpartition("submitted to cluster ")[2].partition(".")[0]

    def _description(self, script: str, requirements: str, **more: object) -> str:
        fields = {"node": "$(Cluster)", "inputs": "", "lease": 300, "memory": 64, **more}
        return DESCRIPTION.format(
            script=script, requirements=requirements, folder=self.folder, **fields
        )

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

        return int(wait_for(look, f"the site to tell of job {remote}", 60))


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
