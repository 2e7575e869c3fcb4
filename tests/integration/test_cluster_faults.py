"""Faults under a virtual cluster: users' jobs still end, each of them once."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.kit.faults import (
    Running,
    Tell,
    Volley,
    declared,
    fill,
    silent,
    small_disk,
    started_again,
    without_objects,
)
from tests.kit.grid import NODES, Grid, healthy, run, wait_for
from tests.kit.grid_clusters import UP_SECONDS, delete, machines, up
from vmjobs.client import Client
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState
from vmjobs.cluster.wire import ClusterVm

#: Tests that take less than a minute run every time, the others only in `make soak`.
pytestmark = pytest.mark.disruptive

#: Seconds within which condor_master has scanned its daemons' processes; it does so each minute.
SNAPSHOT = 75
#: Timeout for a job on a node that falls silent: by then it is LOST, and another VM is up.
SILENT = 180.0
#: Rounds of jobs that race with a drain.
ROUNDS = int(os.environ.get("VMJOBS_DRAIN_ROUNDS", "5"))
#: Rounds that share one set of VMs started together.
RACERS = 5


@pytest.fixture(scope="module")
def shared(grid: Grid, operator: Client) -> Iterator[str]:
    """A cluster with a VM on each of two nodes, which must survive all tests that share it."""
    name = f"f{random.randrange(16**8):08x}"
    operator.clusters.put(declared(name))
    yield name
    known = [name, *(vm.id for vm in operator.clusters.get(name).members)]
    delete(operator, name)

    def left() -> list[str]:
        there = machines(grid, name)
        for node in NODES:
            there += grid.on(
                node, "pgrep", "-fa", "umid=|guest=|vmjobs-outside", check=False
            ).splitlines()
        return [line for line in there if any(word in line for word in known)]

    wait_for(lambda: not left() or None, "nothing to be left", 60)


Run = Callable[..., Running]


@pytest.fixture
def running(grid: Grid, operator: Client, record_property: Tell) -> Run:
    """Start a job in a cluster and record its result for the report."""
    return partial(Running, grid, operator, record_property)


def member_of(operator: Client, job: Running) -> ClusterVm | None:
    """The current state of the cluster VM in which a job ran."""
    vms = operator.clusters.get(job.cluster).members
    return next((m for m in vms if m.id == job.member.id), None)


@pytest.mark.soak
def test_a_node_whose_disk_is_full(grid: Grid, operator: Client, running: Run, name: str) -> None:
    """A VM on the node keeps running and ends its job; a second VM fails until there is space.

    This test runs before those that leave VMs on their nodes.
    """
    node = NODES[0]

    def second() -> ClusterVm | None:
        found = [m for m in operator.clusters.get(name).members if m.name == f"{name}-1"]
        return found[0] if found and found[0].code is not ClusterVmCode.PROGRESS else None

    with small_disk(grid, node, "members", 512 * 1024) as vms:
        operator.clusters.put(declared(name, 1, nodes=[f"{node}.grid"]))
        (before,) = up(operator, name, 1).members
        job = running(name)
        filler = fill(grid, node, vms)
        operator.clusters.scale(name, 2)
        failed = wait_for(second, "the other VM to fail", 60)
        assert (failed.state, failed.code) == (ClusterVmState.BACKOFF, ClusterVmCode.NODE_FAILED)
        assert "No space left on device" in failed.message
        job.assert_ended_once()
        grid.on(node, "rm", filler)
        after = up(operator, name, 2).members
        assert next(m.id for m in after if m.name == before.name) == before.id
        delete(operator, name)


@pytest.mark.soak
def test_the_agent_is_killed(grid: Grid, operator: Client, running: Run, shared: str) -> None:
    """condor_master, the agent's supervisor, takes no VM for a process of the agent's family."""
    before = up(operator, shared, 2)
    wait_for(
        lambda: min(age(grid, vm) for vm in before.members) > SNAPSHOT or None,
        "the master to have looked",
        2 * SNAPSHOT,
    )
    job = running(shared, seconds=20)
    grid.on(job.node, "pkill", "-KILL", "-f", "vmjobs agent")
    assert job.assert_ended_once() == 1
    healthy(grid.container(job.node))
    after = up(operator, shared, 2)
    assert [(m.id, m.incarnation) for m in after.members] == [
        (m.id, m.incarnation) for m in before.members
    ]


def age(grid: Grid, vm: ClusterVm) -> int:
    """Seconds since a cluster VM was started."""
    on = vm.node.removesuffix(".grid")
    kernel = grid.on(on, "pgrep", "-o", "-f", f"umid=vmjobs-[^ ]*{vm.id}-{vm.incarnation} ")
    return int(grid.on(on, "ps", "-o", "etimes=", "-p", kernel.strip()))


@pytest.mark.soak
def test_the_service_is_killed(
    grid: Grid, operator: Client, running: Run, name: str, shared: str
) -> None:
    """The service dies while a job runs and while another cluster boots."""
    up(operator, shared, 2)
    job = running(shared)
    operator.clusters.put(declared(name))
    wait_for(
        lambda: (
            any(m.state is ClusterVmState.BOOTING for m in operator.clusters.get(name).members) or None
        ),
        "a machine to boot",
        60,
    )
    # Their containers end with them, and pkill may end with its container.
    grid.on("worker", "pkill", "-KILL", "-f", "vmjobs worker", check=False)
    grid.on("api", "pkill", "-KILL", "-f", "vmjobs serve", check=False)
    healthy(grid.container("api"))
    assert job.assert_ended_once() == 1
    assert {m.incarnation for m in up(operator, name, 2).members} == {1}
    after = member_of(operator, job)
    assert after is not None
    assert after.incarnation == job.member.incarnation


@pytest.mark.soak
def test_the_collector_is_killed(grid: Grid, operator: Client, running: Run, shared: str) -> None:
    before = up(operator, shared, 2)
    job = running(shared)
    grid.on("site", "pkill", "-KILL", "-x", "condor_collecto")
    job.assert_ended_once()
    # Jobs run again, in the same VMs.
    running(shared, seconds=1).assert_ended_once()
    after = up(operator, shared, 2)
    assert [(m.id, m.incarnation) for m in after.members] == [
        (m.id, m.incarnation) for m in before.members
    ]


@pytest.mark.soak
def test_a_vm_that_is_needed_while_the_service_is_away(
    grid: Grid, operator: Client, shared: str
) -> None:
    """The VM's image and token are unavailable at first; it comes up once the API is back."""
    (before, *_) = up(operator, shared, 2).members
    node = before.node.removesuffix(".grid")
    with started_again(grid, "api"):
        run("docker", "kill", grid.container("api"))
        grid.on(node, "pkill", "-KILL", "-f", f"umid=vmjobs-[^ ]*{before.id}-")
        booted = f"umid=vmjobs-[^ ]*{before.id}-{before.incarnation + 1}"
        wait_for(lambda: grid.on(node, "pgrep", "-f", booted, check=False), "another machine", 60)

    def back() -> ClusterVm | None:
        found = next(m for m in operator.clusters.get(shared).members if m.id == before.id)
        return found if found.state is ClusterVmState.UP and found.incarnation > 1 else None

    wait_for(back, "the VM to be up", UP_SECONDS)


@pytest.mark.soak
def test_an_image_that_cannot_be_had_now(grid: Grid, operator: Client, name: str) -> None:
    """The service runs but has lost the image's data, and the node has none of it."""
    node = NODES[1]
    images = "/var/lib/vmjobs/agent/images"

    def pausing() -> ClusterVm | None:
        (vm,) = operator.clusters.get(name).members or [None]
        return vm if vm and vm.state is ClusterVmState.BACKOFF else None

    grid.on(node, "sh", "-c", f"cd {images} && rm -rf manifests/* contents/* verified/* partial/*")
    with without_objects(grid):
        operator.clusters.put(declared(name, 1, nodes=[f"{node}.grid"]))
        failed = wait_for(pausing, "the VM to have failed", 60)
        assert failed.code is ClusterVmCode.IMAGE_UNAVAILABLE
        assert failed.message
    up(operator, name, 1)


@pytest.mark.soak
def test_a_node_dies_and_comes_back(grid: Grid, operator: Client, running: Run, shared: str) -> None:
    up(operator, shared, 2)
    job = running(shared)
    with started_again(grid, job.node):
        run("docker", "kill", grid.container(job.node))
    job.assert_ended_once()
    up(operator, shared, 2)


@pytest.mark.soak
def test_a_vm_that_is_frozen_is_replaced(grid: Grid, operator: Client, running: Run, name: str) -> None:
    operator.clusters.put(declared(name))
    up(operator, name, 2)
    job = running(name)
    found = grid.on(job.node, "pgrep", "-f", f"umid=vmjobs-[^ ]*{job.member.id}-")
    grid.on(job.node, "kill", "-STOP", *found.split())
    assert job.assert_ended_once() == 2  # in the other VM

    def back() -> ClusterVm | None:
        now = member_of(operator, job)
        again = now and now.incarnation > job.member.incarnation and now.state is ClusterVmState.UP
        return now if again else None

    wait_for(back, "the VM to be replaced", 120 + UP_SECONDS)
    told = [e for e in operator.clusters.events(name) if e.member == job.member.name]
    assert ClusterVmCode.GUEST_LOST in {e.code for e in told}


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_job_is_lost_to_a_drain(
    grid: Grid, operator: Client, name: str, record_property: Tell
) -> None:
    """Jobs are matched at about the times when VMs are told to drain, one after the other."""
    dice, rounds, jobs, again = random.Random(), 0, 0, 0
    operator.clusters.put(declared(name, RACERS + 1))
    while rounds < ROUNDS:
        operator.clusters.scale(name, RACERS + 1)
        up(operator, name, RACERS + 1)
        volley = Volley(grid)
        for left in range(RACERS, 0, -1):
            volley.fire(name)
            time.sleep(dice.uniform(0.0, 2.0))
            operator.clusters.scale(name, left)
            volley.fire(name)
        starts = volley.all_starts()
        rounds, jobs, again = rounds + RACERS, jobs + len(starts), again + sum(n > 1 for n in starts)
        record_property("note", f"{rounds} rounds, {jobs} jobs, {again} of them begun more than once")
        wait_for(lambda: len(operator.clusters.get(name).members) == 1 or None, "all but one to go", 60)
    assert again == 0


@pytest.mark.soak
def test_a_node_falls_silent(grid: Grid, operator: Client, running: Run, name: str) -> None:
    """The VM keeps running and its packets vanish: no connection to it ever ends by itself."""
    operator.clusters.put(declared(name))
    up(operator, name, 2)
    job = running(name)
    with silent(grid, job.node):
        assert job.assert_ended_once(SILENT) == 2
        assert job.ended_in != job.member.name
    # The first VM has done the job, too, but its result is discarded.
    up(operator, name, 2)
    job.assert_ended_once()
