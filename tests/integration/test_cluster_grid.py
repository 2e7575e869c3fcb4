"""Virtual clusters on the grid: declared by an operator, used by HTCondor users, deleted."""

from __future__ import annotations

import pytest

from tests.kit.cli import vmjobs
from tests.kit.grid import NODES, Grid, wait_for
from tests.kit.grid_clusters import UP_SECONDS, Submitter, gone, machines, up
from vmjobs.client import Client
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.vm_state import ClusterVmState
from vmjobs.cluster.wire import Cluster

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


def test_a_cluster_runs_jobs_of_the_pool_and_leaves_nothing(
    grid: Grid, operator: Client, name: str
) -> None:
    spec = ClusterSpec(
        name=name, image="worker", size=2, memory=512, disk=512, attributes={"Flavour": "strange"}
    )
    assert operator.clusters.put(spec).outcome == "created"
    assert operator.clusters.put(spec).outcome == "unchanged"
    cluster = up(operator, name, 2)
    vms = {vm.name: vm for vm in cluster.members}
    assert set(vms) == {f"{name}-0", f"{name}-1"}
    assert {vm.node for vm in cluster.members} == {f"{node}.grid" for node in NODES}

    user = Submitter(grid)
    jobs = [
        user.submit(name, "hostname; . /etc/os-release; echo $PRETTY_NAME; id -u; sleep 3")
        for _ in "12"
    ]
    for job in jobs:
        host, system, uid = user.output(job).splitlines()
        assert host in {f"{vm}.vc" for vm in vms}
        assert system == "Debian GNU/Linux 13 (trixie)"
        assert int(uid) > 0

    # A drain lets running jobs end, keeps later ones waiting, and removes the VMs.
    running = user.submit(name, "sleep 10; echo to the end")
    wait_for(lambda: user.status(running) == "2" or None, "the job to run", 60)
    operator.clusters.drain(name)
    late = user.submit(name, "echo never")
    assert user.output(running) == "to the end\n"
    wait_for(lambda: not operator.clusters.get(name).members or None, "all VMs to go", 120)
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


def test_a_vm_that_is_killed_comes_back_under_its_name(grid: Grid, operator: Client, name: str) -> None:
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
        (vm,) = found.members
        again = vm.incarnation > before.incarnation and vm.state is ClusterVmState.UP
        return found if again else None

    (after,) = wait_for(back, "another VM of the same name", UP_SECONDS).members
    assert (after.name, after.id, after.node) == (before.name, before.id, before.node)
    assert user.output(job).splitlines() == [f"{before.name}.vc", "done"]  # in the new VM


def test_an_operator_logs_in_and_a_job_cannot(grid: Grid, operator: Client, name: str) -> None:
    """Login uses a way that only the VM's root can open; a job can see it but not use it."""
    spec = ClusterSpec(name=name, image="worker", size=1, memory=512, disk=512)
    operator.clusters.put(spec)
    up(operator, name, 1)

    def ssh(command: str) -> tuple[str, int]:
        words = ("cluster", "ssh", f"{name}-0", "--", command)
        done = vmjobs(*words, api_url=grid.url, token_file=grid.admin_token)
        return done.out, done.code

    assert ssh("hostname; id -u") == (f"{name}-0.vc\n0\n", 0)
    assert ssh("pgrep -c condor_startd; exit 7") == ("1\n", 7)
    user = Submitter(grid)
    secrets = "/run/vmjobs/job/job.env /run/vmjobs-ssh/key"
    job = user.submit(name, f"cat {secrets} 2>/dev/null; echo $?; ls /run/vmjobs-ssh; echo $?")
    assert user.output(job) == "1\n2\n"
    assert ssh(f"cat {secrets} >/dev/null") == ("", 0)
    told = [e.message for e in operator.clusters.events(name) if e.code == "LOGIN"]
    assert len(told) == 3
