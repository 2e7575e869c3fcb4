"""Autoscaling on the grid: a cluster goes from no VM to one for a job, and back to none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.kit.grid import Grid, wait_for
from tests.kit.grid_clusters import UP_SECONDS, Submitter
from vmjobs.client import Client
from vmjobs.cluster.spec import ClusterSpec, SizeRange


def shown(grid: Grid, cluster: str) -> str:
    """`true` if the pool has an ad for a VM of the cluster that is switched off; else empty."""
    constraint = f'VMJobsCluster == "{cluster}" && Offline =?= true'
    return grid.on("site", "condor_status", "-constraint", constraint, "-af", "Offline").strip()


def test_a_job_wakes_a_cluster_that_sleeps_again_when_it_has_ended(
    grid: Grid,
    operator: Client,
    name: str,
) -> None:
    spec = ClusterSpec(
        name=name, image="worker", size=SizeRange(min=0, max=2), memory=512, disk=512, idle_seconds=20
    )
    assert operator.clusters.put(spec).cluster.target == 0
    wait_for(lambda: shown(grid, name) == "true" or None, "the pool to show the cluster", 60)
    assert operator.clusters.get(name).members == ()

    def scaled() -> list[str]:
        return [e.message for e in operator.clusters.events(name) if e.state == "SCALED"]

    # A job that a node has room for waits for no cluster and wakes none, although the cluster's VM is
    # the smallest slot for it. (It keeps off other tests' clusters, whose VMs may be killed.)
    user = Submitter(grid)
    job = user.submit_where(
        f'isUndefined(TARGET.VMJobsCluster) || TARGET.VMJobsCluster == "{name}"', "hostname"
    )
    assert not user.output(job, timeout=240).startswith(name)
    assert (operator.clusters.get(name).target, scaled()) == (0, [])

    job = user.submit(name, "hostname")
    assert user.output(job, timeout=UP_SECONDS) == f"{name}-0.vc\n"
    assert scaled() in (
        ["1 VM: 1 idle job that only this cluster can run"],
        ["1 VM: woken by a request of site"],  # HTCondor may be faster
    )

    # A pool that takes seconds to answer, as on a busy host, is polled ten times less often.
    wait_for(lambda: not operator.clusters.get(name).members or None, "the VM to go", 300)
    assert operator.clusters.get(name).target == 0
    wait_for(lambda: shown(grid, name) == "true" or None, "the pool to show the cluster", 60)


@contextmanager
def full(user: Submitter, node: str) -> Iterator[None]:
    """Fill a node with jobs until no memory is left for others, even if other jobs run there."""
    constraint = f'Machine == "{node}" && PartitionableSlot'
    asked, fillers = 0, []

    def filled() -> bool:
        nonlocal asked
        free = int(user.grid.on("site", "condor_status", "-constraint", constraint, "-af", "Memory"))
        if free >= 64 and free != asked:
            this = f'TARGET.Machine == "{node}"'
            fillers.append(user.submit_where(this, "sleep 900", memory=free))
            asked = free
        return free < 64

    try:
        wait_for(filled, f"{node} to be full", 120)
        yield
    finally:
        user("condor_rm", *fillers)


@pytest.mark.soak
@pytest.mark.disruptive  # it takes a whole node, for which jobs of other tests would wait
def test_htcondor_wakes_a_cluster_for_a_job_that_another_vm_has_no_room_for(
    grid: Grid,
    operator: Client,
    name: str,
) -> None:
    """The service leaves such a job to the node; the negotiator has only the cluster for it."""
    spec = ClusterSpec(name=name, image="worker", size=SizeRange(min=0, max=2), memory=512, disk=512)
    operator.clusters.put(spec)
    wait_for(lambda: shown(grid, name) == "true" or None, "the pool to show the cluster", 60)

    user = Submitter(grid)
    with full(user, "node2.grid"):
        either = f'TARGET.VirtualCluster == "{name}" || TARGET.Machine == "node2.grid"'
        job = user.submit_where(either, "hostname")
        assert user.output(job, timeout=UP_SECONDS) == f"{name}-0.vc\n"
    told = [e.message for e in operator.clusters.events(name) if e.state == "SCALED"]
    assert told == ["1 VM: woken by a request of site"]
