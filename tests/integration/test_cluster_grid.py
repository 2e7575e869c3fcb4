"""Virtual clusters on the grid: declared by an operator, used by HTCondor users, deleted."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.kit.cli import vmjobs
from tests.kit.grid import NODES, Grid, wait_for
from tests.kit.grid_clusters import UP_SECONDS, Submitter, delete, gone, machines, up
from vmjobs.client import Client
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.vm_state import ClusterVmState
from vmjobs.cluster.wire import ClusterVm

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


@pytest.fixture(scope="module")
def cluster(grid: Grid, operator: Client) -> Iterator[str]:
    """A cluster of two VMs, which the tests of this module share; its last test drains it."""
    name = f"t{uuid.uuid4().hex[:8]}"
    spec = ClusterSpec(
        name=name, image="worker", size=2, memory=512, disk=512, attributes={"Flavour": "strange"}
    )
    assert operator.clusters.put(spec).outcome == "created"
    assert operator.clusters.put(spec).outcome == "unchanged"
    yield name
    delete(operator, name)


def test_a_cluster_runs_jobs_of_the_pool(grid: Grid, operator: Client, cluster: str) -> None:
    vms = up(operator, cluster, 2).members
    names = {vm.name for vm in vms}
    assert names == {f"{cluster}-0", f"{cluster}-1"}
    assert {vm.node for vm in vms} == {f"{node}.grid" for node in NODES}
    user = Submitter(grid)
    jobs = [
        user.submit(cluster, "hostname; . /etc/os-release; echo $PRETTY_NAME; id -u; sleep 3")
        for _ in "12"
    ]
    for job in jobs:
        host, system, uid = user.output(job).splitlines()
        assert host in {f"{name}.vc" for name in names}
        assert system == "Debian GNU/Linux 13 (trixie)"
        assert int(uid) > 0


def test_an_operator_logs_in_and_a_job_cannot(grid: Grid, operator: Client, cluster: str) -> None:
    """Login uses a way that only the VM's root can open; a job can see it but not use it."""
    up(operator, cluster, 2)

    def ssh(command: str) -> tuple[str, int]:
        words = ("cluster", "ssh", f"{cluster}-0", "--", command)
        done = vmjobs(*words, api_url=grid.url, token_file=grid.admin_token)
        return done.out, done.code

    assert ssh("hostname; id -u") == (f"{cluster}-0.vc\n0\n", 0)
    assert ssh("pgrep -c condor_startd; exit 7") == ("1\n", 7)
    user = Submitter(grid)
    secrets = "/run/vmjobs/job/job.env /run/vmjobs-ssh/key"
    script = f"cat {secrets} 2>/dev/null; echo $?; ls /run/vmjobs-ssh; echo $?"
    job = user.submit_where(f'TARGET.Machine == "{cluster}-0.vc"', script)
    assert user.output(job) == "1\n2\n"
    assert ssh(f"cat {secrets} >/dev/null") == ("", 0)
    told = [e.message for e in operator.clusters.events(cluster) if e.code == "LOGIN"]
    assert len(told) == 3


@pytest.mark.soak
def test_a_dag_runs_in_a_cluster(grid: Grid, operator: Client, cluster: str) -> None:
    vms = {f"{vm.name}.vc" for vm in up(operator, cluster, 2).members}
    user = Submitter(grid)
    dag = user.submit_dag(cluster, DIAMOND)
    wait_for(lambda: not user.status(dag) or None, "the graph to be done", 300)
    assert user("condor_history", dag, "-limit", "1", "-af", "ExitCode").strip() == "0"
    host, *counts = user("cat", f"{user.folder}/out.D").splitlines()
    assert (host in vms, counts) == (True, ["5", "2"])


def test_a_vm_that_is_killed_comes_back_under_its_name(
    grid: Grid, operator: Client, cluster: str
) -> None:
    before, *_ = up(operator, cluster, 2).members
    user = Submitter(grid)
    here = f'TARGET.Machine == "{before.name}.vc"'
    job = user.submit_where(here, "hostname; sleep 30; echo done", lease=20)
    wait_for(lambda: user.status(job) == "2" or None, "the job to run", 120)
    node = before.node.removesuffix(".grid")
    grid.on(node, "pkill", "-KILL", "-f", f"umid=vmjobs-[^ ]*{before.id}-")

    def back() -> ClusterVm | None:
        found = operator.clusters.get(cluster)
        vm = next(vm for vm in found.members if vm.name == before.name)
        again = vm.incarnation > before.incarnation and vm.state is ClusterVmState.UP
        return vm if again else None

    after = wait_for(back, "another VM of the same name", UP_SECONDS)
    assert (after.name, after.id, after.node) == (before.name, before.id, before.node)
    assert user.output(job, 240).splitlines() == [f"{before.name}.vc", "done"]  # in the new VM


def test_a_drain_lets_running_jobs_end_and_leaves_nothing(
    grid: Grid, operator: Client, cluster: str
) -> None:
    """This is the last test of the module: it deletes the cluster."""
    up(operator, cluster, 2)
    user = Submitter(grid)
    running = user.submit(cluster, "sleep 30; echo to the end")
    wait_for(lambda: user.status(running) == "2" or None, "the job to run", 120)
    operator.clusters.drain(cluster)
    late = user.submit(cluster, "echo never")
    assert user.output(running) == "to the end\n"
    wait_for(lambda: not operator.clusters.get(cluster).members or None, "all VMs to go", 120)
    assert user.status(late) in {"1", "2"}  # idle at the site; HTCondor may not have reported it yet
    user("condor_rm", late)
    operator.clusters.delete(cluster)
    wait_for(lambda: gone(operator, cluster) or None, "the cluster to go", 60)
    wait_for(
        lambda: not [m for m in machines(grid, cluster) if cluster in m] or None,
        "nothing to be left",
        60,
    )
