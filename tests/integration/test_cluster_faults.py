"""What dies or goes away under a virtual cluster; users' jobs end all the same, each of them once."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import test_cluster_grid
from grid_kit import NODES, Grid, healthy, run, wait_for
from test_cluster_grid import UP_SECONDS, Submitter, delete, machines, up

from vmjobs.client import Client
from vmjobs.cluster.member import MemberCode, MemberState
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.wire import Cluster, Member

pytestmark = pytest.mark.soak

#: Fixtures.
operator, name = test_cluster_grid.operator, test_cluster_grid.name

#: Seconds in which a job waits for a machine that does not answer any more.
LEASE = 20
#: Seconds in which a job comes through whatever is broken, once that is mended.
LATE = 240.0
#: Rounds of jobs that race with a drain.
ROUNDS = int(os.environ.get("VMJOBS_DRAIN_ROUNDS", "5"))


def declared(name: str, size: int = 2, **fields: object) -> ClusterSpec:
    words = {"image": "worker", "memory": 512, "disk": 512, **fields}
    return ClusterSpec.model_validate({"name": name, "size": size, **words})


@pytest.fixture(scope="module")
def shared(grid: Grid, operator: Client) -> Iterator[str]:
    """A cluster of two machines, one on each node, that has survived all before."""
    name = f"f{random.randrange(16**8):08x}"
    operator.clusters.put(declared(name))
    yield name
    known = [name, *(member.id for member in operator.clusters.get(name).members)]
    delete(operator, name)

    def left() -> list[str]:
        there = machines(grid, name)
        for node in NODES:
            there += grid.on(node, "pgrep", "-fa", "umid=|guest=|usernet", check=False).splitlines()
        return [line for line in there if any(word in line for word in known)]

    wait_for(lambda: not left() or None, "nothing to be left", 60)


class Running:
    """A user's job that has begun in a machine of a cluster."""

    def __init__(self, grid: Grid, operator: Client, cluster: str, seconds: int = 10) -> None:
        self.grid, self.operator, self.cluster = grid, operator, cluster
        self.user = Submitter(grid)
        script = f"echo ran on $(cat /proc/sys/kernel/hostname); sleep {seconds}; echo done"
        self.job = self.user.submit(cluster, script, lease=LEASE)
        self.member = wait_for(self._busy, "the job to run in a machine", 120)

    def _busy(self) -> Member | None:
        """The machine that runs it, as the site's schedd has it."""
        at_site = self.user("condor_q", self.job, "-af", "GridJobId").split()
        if len(at_site) < 4:
            return None
        asked = ("JobStatus", "JobCurrentStartExecutingDate", "RemoteHost")
        found = self.grid.on("site", "condor_q", at_site[-1], "-af", *asked).split()
        if found[:1] != ["2"] or found[1] == "undefined":
            return None
        host = found[2].rpartition("@")[2].removesuffix(".vc")
        members = self.operator.clusters.get(self.cluster).members
        return next((m for m in members if m.name == host), None)

    @property
    def node(self) -> str:
        """The compose service of the node that runs it."""
        return self.member.node.removesuffix(".grid")

    def assert_ended_once(self, timeout: float = LATE) -> int:
        """Wait for its result, which is there once. How often it was started for that."""
        began, end = self.user.output(self.job, timeout).splitlines()
        assert (began.rpartition(" ")[0], end) == ("ran on", "done")
        told = self.user("cat", f"{self.user.folder}/log")
        assert told.count(f"005 ({int(self.job):03d}.") == 1, told
        return self.user.starts(self.job)


@contextmanager
def started_again(grid: Grid, *services: str) -> Iterator[None]:
    """Have containers run again, and be well."""
    try:
        yield
    finally:
        for service in services:
            run("docker", "start", grid.container(service))
        for service in services:
            healthy(grid.container(service))


def member_of(operator: Client, job: Running) -> Member | None:
    """What there is now of the member that a job ran in."""
    members = operator.clusters.get(job.cluster).members
    return next((m for m in members if m.id == job.member.id), None)


def wait_state(operator: Client, name: str, *states: MemberState, timeout: float = 60) -> Cluster:
    """Wait until the machines of a cluster are in these states, in whatever order."""

    def look() -> Cluster | None:
        found = operator.clusters.get(name)
        return found if sorted(m.state for m in found.members) == sorted(states) else None

    return wait_for(look, f"machines of {name} to be {', '.join(states)}", timeout)


@pytest.mark.disruptive
def test_the_agent_is_killed(grid: Grid, operator: Client, shared: str) -> None:
    up(operator, shared, 2)
    job = Running(grid, operator, shared)
    grid.on(job.node, "pkill", "-KILL", "-f", "vmjobs agent")
    # condor_master may take an older machine along with its agent; the job begins again then.
    assert job.assert_ended_once() >= 1
    healthy(grid.container(job.node))
    up(operator, shared, 2)


@pytest.mark.disruptive
def test_the_service_is_killed(grid: Grid, operator: Client, name: str, shared: str) -> None:
    """While a job runs, and while another cluster comes up."""
    up(operator, shared, 2)
    job = Running(grid, operator, shared)
    operator.clusters.put(declared(name))
    wait_for(
        lambda: (
            any(m.state is MemberState.BOOTING for m in operator.clusters.get(name).members) or None
        ),
        "a machine to boot",
        60,
    )
    grid.on("worker", "pkill", "-KILL", "-f", "vmjobs worker")
    grid.on("api", "pkill", "-KILL", "-f", "vmjobs serve")
    healthy(grid.container("api"))
    assert job.assert_ended_once() == 1
    assert {m.incarnation for m in up(operator, name, 2).members} == {1}
    after = member_of(operator, job)
    assert after is not None
    assert after.incarnation == job.member.incarnation


@pytest.mark.disruptive
def test_the_collector_is_killed(grid: Grid, operator: Client, shared: str) -> None:
    before = up(operator, shared, 2)
    job = Running(grid, operator, shared)
    grid.on("site", "pkill", "-KILL", "-x", "condor_collecto")
    job.assert_ended_once()
    # And jobs come again, to the same machines.
    Running(grid, operator, shared, seconds=1).assert_ended_once()
    after = up(operator, shared, 2)
    assert [(m.id, m.incarnation) for m in after.members] == [
        (m.id, m.incarnation) for m in before.members
    ]


@pytest.mark.disruptive
def test_a_machine_that_is_needed_while_the_service_is_away(
    grid: Grid, operator: Client, shared: str
) -> None:
    """Its image and its token cannot be had; all comes once they can."""
    (before, *_) = up(operator, shared, 2).members
    node = before.node.removesuffix(".grid")
    with started_again(grid, "api"):
        run("docker", "kill", grid.container("api"))
        grid.on(node, "pkill", "-KILL", "-f", f"umid=vmjobs-[^ ]*{before.id}-")
        booted = f"umid=vmjobs-[^ ]*{before.id}-{before.incarnation + 1}"
        wait_for(lambda: grid.on(node, "pgrep", "-f", booted, check=False), "another machine", 60)

    def back() -> Member | None:
        found = next(m for m in operator.clusters.get(shared).members if m.id == before.id)
        return found if found.state is MemberState.UP and found.incarnation > 1 else None

    wait_for(back, "the machine to be up", UP_SECONDS)


@pytest.mark.disruptive
def test_a_node_that_has_no_room_for_disks(grid: Grid, operator: Client, name: str) -> None:
    """Its agent cannot write a machine's disks; it says so, tries again, and mends by itself."""
    node = "node1"
    agent = grid.on(node, "pgrep", "-o", "-f", "vmjobs agent").strip()

    def limit(size: int | str) -> None:
        grid.on(node, "prlimit", f"--pid={agent}", f"--fsize={size}:", user="vmjobs-agent")

    limit(64 * 1024 * 1024)
    try:
        operator.clusters.put(declared(name, 1, nodes=[f"{node}.grid"]))
        (failed,) = wait_state(operator, name, MemberState.BACKOFF).members
    finally:
        limit("unlimited")
    assert failed.code in {MemberCode.NODE_FAILED, MemberCode.BOOT_FAILED}
    assert "large" in failed.message, failed.message
    up(operator, name, 1)


@pytest.mark.disruptive
def test_a_node_dies_and_comes_back(grid: Grid, operator: Client, shared: str) -> None:
    up(operator, shared, 2)
    job = Running(grid, operator, shared)
    with started_again(grid, job.node):
        run("docker", "kill", grid.container(job.node))
    job.assert_ended_once()
    up(operator, shared, 2)


def test_a_machine_that_is_frozen_is_replaced(grid: Grid, operator: Client, name: str) -> None:
    operator.clusters.put(declared(name))
    up(operator, name, 2)
    job = Running(grid, operator, name)
    found = grid.on(job.node, "pgrep", "-f", f"umid=vmjobs-[^ ]*{job.member.id}-")
    grid.on(job.node, "kill", "-STOP", *found.split())
    assert job.assert_ended_once() == 2  # in the other machine

    def back() -> Member | None:
        now = member_of(operator, job)
        again = now and now.incarnation > job.member.incarnation and now.state is MemberState.UP
        return now if again else None

    wait_for(back, "the machine to be replaced", 120 + UP_SECONDS)
    told = [e for e in operator.clusters.events(name) if e.member == job.member.name]
    assert MemberCode.GUEST_LOST in {e.code for e in told}


def test_an_image_that_never_joins_is_told_of_and_tried_again(operator: Client, name: str) -> None:
    operator.clusters.put(declared(name, 1, image="generic", join_seconds=5))

    def pausing() -> Member | None:
        (member,) = operator.clusters.get(name).members or [None]
        again = member and member.state is MemberState.BACKOFF and member.failures > 0
        return member if again else None

    member = wait_for(pausing, "the machine to have failed", 120)
    assert member.code in {MemberCode.JOIN_TIMED_OUT, MemberCode.GUEST_ENDED}
    assert member.message
    assert member.retry is not None


def test_no_job_is_lost_to_a_drain(grid: Grid, operator: Client, name: str) -> None:
    """Jobs are matched at about the time at which one of the machines is told to drain."""
    operator.clusters.put(declared(name))
    dice = random.Random()
    for _ in range(ROUNDS):
        up(operator, name, 2)
        user = Submitter(grid)
        jobs = [user.submit(name, "sleep 1; echo done", lease=LEASE) for _ in range(2)]
        time.sleep(dice.uniform(0.0, 10.0))
        operator.clusters.scale(name, 1)
        for job in jobs:
            assert user.output(job, LATE) == "done\n"
            assert user.starts(job) == 1
        wait_for(lambda: len(operator.clusters.get(name).members) == 1 or None, "one to go", 60)
        operator.clusters.scale(name, 2)
