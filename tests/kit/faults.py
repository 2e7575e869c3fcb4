"""Faults to inject under a virtual cluster, and users' jobs that run there meanwhile."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from tests.kit.grid import Grid, healthy, run, wait_for
from tests.kit.grid_clusters import Submitter
from vmjobs.client import Client
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.wire import ClusterVm

#: JobLeaseDuration in seconds: how long a job waits for a VM that stopped answering.
LEASE = 20
#: Seconds within which a job ends once the fault is repaired.
LATE = 240.0
#: Records a property of the test for the report, by name.
Tell = Callable[[str, object], None]


def declared(name: str, size: int = 2, **fields: object) -> ClusterSpec:
    words = {"image": "worker", "memory": 512, "disk": 512, **fields}
    return ClusterSpec.model_validate({"name": name, "size": size, **words})


class Running:
    """A user's job that has started in a cluster VM. tell: records properties for the report."""

    def __init__(
        self, grid: Grid, operator: Client, tell: Tell, cluster: str, seconds: int = 10
    ) -> None:
        self.grid, self.operator, self.cluster, self._tell = grid, operator, cluster, tell
        self.user = Submitter(grid)
        script = f"echo ran on $(cat /proc/sys/kernel/hostname); sleep {seconds}; echo done"
        self.job = self.user.submit(cluster, script, lease=LEASE)
        self.member = wait_for(self._busy, "the job to run in a machine", 120)
        self.began = time.monotonic()
        #: The name of the cluster VM in which the job ended.
        self.ended_in = ""

    def _busy(self) -> ClusterVm | None:
        """The VM that runs the job, according to the site's schedd."""
        at_site = self.user("condor_q", self.job, "-af", "GridJobId").split()
        if len(at_site) < 4:
            return None
        asked = ("JobStatus", "JobCurrentStartExecutingDate", "RemoteHost")
        found = self.grid.on("site", "condor_q", at_site[-1], "-af", *asked).split()
        if found[:1] != ["2"] or found[1] == "undefined":
            return None
        host = found[2].rpartition("@")[2].removesuffix(".vc")
        vms = self.operator.clusters.get(self.cluster).members
        return next((m for m in vms if m.name == host), None)

    @property
    def node(self) -> str:
        """The compose service of the node that runs the VM."""
        return self.member.node.removesuffix(".grid")

    def assert_ended_once(self, timeout: float = LATE) -> int:
        """Assert that the job ends with one result; return how often it was started."""
        began, end = self.user.output(self.job, timeout).splitlines()
        took = time.monotonic() - self.began
        assert (began.rpartition(" ")[0], end) == ("ran on", "done")
        self.ended_in = began.rpartition(" ")[2].removesuffix(".vc")
        told = self.user("cat", f"{self.user.folder}/log")
        assert told.count(f"005 ({int(self.job):03d}.") == 1, told
        starts = self.user.starts(self.job)
        self._tell("job", (round(took), starts))
        return starts


class Volley(Submitter):
    """Many jobs of one user, queried together."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.jobs: list[str] = []

    def fire(self, cluster: str) -> None:
        self.jobs.append(self.submit(cluster, "sleep 1; echo done", lease=LEASE))

    def all_starts(self) -> list[int]:
        """Assert that each job ended well and once; return how often the site started each."""
        wait_for(
            lambda: not self("condor_q", *self.jobs, "-af", "ClusterId") or None, "all to end", LATE
        )
        found = self("sh", "-c", f"cat {self.folder}/out.*")
        assert found == "done\n" * len(self.jobs), f"{found.count('done')} of {len(self.jobs)} jobs"
        told = self("cat", f"{self.folder}/log")
        assert [told.count(f"005 ({int(job):03d}.") for job in self.jobs] == [1] * len(self.jobs)
        remote = self("condor_history", *self.jobs, "-af", "GridJobId").split()[3::4]
        # A job that has ended stays in the site's queue for a while and may leave at any time. So ask
        # the queue first: asked last, it could have dropped a job after the history was read.
        asked = (*remote, "-af:j", "NumShadowStarts")
        lines = self.grid.on("site", "condor_q", *asked).splitlines()
        lines += self.grid.on("site", "condor_history", *asked).splitlines()
        known = dict(line.split() for line in lines)
        assert sorted(known) == sorted(remote)
        return [int(starts) for starts in known.values()]


@contextmanager
def started_again(grid: Grid, *services: str) -> Iterator[None]:
    """Start containers again at the end, and wait until they are healthy."""
    try:
        yield
    finally:
        for service in services:
            run("docker", "start", grid.container(service))
        for service in services:
            healthy(grid.container(service))


@contextmanager
def lost(grid: Grid, *services: str) -> Iterator[None]:
    """Kill containers; start them again at the end."""
    run("docker", "kill", "-s", "KILL", *map(grid.container, services))
    with started_again(grid, *services):
        yield


def as_root(grid: Grid, service: str, *command: str) -> str:
    """Run a command on a container's mounts with rights that the container itself lacks."""
    enter = ("nsenter", "--target", "1", "--mount", *command)
    return _beside(grid, service, "pid", ("SYS_ADMIN", "SYS_PTRACE"), *enter)


def _beside(grid: Grid, service: str, shared: str, rights: Sequence[str], *command: str) -> str:
    """Run a tool of the node image as root in a namespace of a host."""
    there = (f"--{shared}=container:{grid.container(service)}", "--user=root")
    allowed = (*(f"--cap-add={right}" for right in rights), "--security-opt=apparmor=unconfined")
    program, *words = command
    image = (f"--entrypoint={program}", f"{grid.project}/node")
    return run("docker", "run", "--rm", *there, *allowed, *image, *words)


#: Prints whether a connection to the API's host succeeds within two seconds.
KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 8443), 2).close()
except OSError as error:
    print("no way:", error)
else:
    print("there")
"""


@contextmanager
def silent(grid: Grid, service: str) -> Iterator[None]:
    """Drop every packet from and to a host; its processes keep running."""
    each = "for way in INPUT:-i OUTPUT:-o; do iptables $1 ${way%:*} ! ${way#*:} lo -j DROP; done"
    rule = partial(_beside, grid, service, "network", ("NET_ADMIN",), "sh", "-c", each, "-")
    # Use the address: a host that is cut off may be unable to resolve names.
    api = grid.on(service, "getent", "ahostsv4", "api.grid").split()[0]
    knock = partial(grid.on, service, "python3", "-c", KNOCK, api)
    wait_for(lambda: knock() == "there\n" or None, f"{service} to reach the API", 60)
    rule("-I")
    try:
        assert knock().startswith("no way: "), f"{service} is not cut off"
        yield
    finally:
        rule("-D")


@contextmanager
def cut_off(grid: Grid, service: str) -> Iterator[None]:
    """Like `silent`, for long enough that every connection notices."""
    with silent(grid, service):
        yield
        time.sleep(30)


#: The directory that holds all data of an agent on a node.
AGENT = "/var/lib/vmjobs/agent"


@contextmanager
def small_disk(grid: Grid, node: str, name: str, kib: int) -> Iterator[str]:
    """Mount a small disk of its own over an empty directory of a node's agent; yield its path."""
    place, own = f"{AGENT}/{name}", ("-o", "vmjobs-agent", "-g", "vmjobs-agent")
    grid.on(node, "install", "-d", "-m", "0700", *own, place)
    there = ("find", place, "-mindepth", "1", "-type", "d")
    wait_for(lambda: not grid.on(node, *there) or None, f"nothing to be in {place}", 60)
    owner = grid.on(node, "stat", "-c", "uid=%u,gid=%g", place).strip()
    options = f"size={kib}k,mode=0700,{owner}"
    as_root(grid, node, "mount", "-t", "tmpfs", "-o", options, "tmpfs", place)
    try:
        yield place
    finally:
        as_root(grid, node, "umount", "--lazy", place)


def fill(grid: Grid, node: str, place: str) -> str:
    """Fill the disk of a directory; return the file that takes the space."""
    file = f"{place}/filler"
    grid.on(node, "dd", "if=/dev/zero", f"of={file}", "bs=1M", check=False)
    return file


#: Overrides what a node offers.
ROOM_DROP_IN = "/etc/condor/config.d/90-test-room.conf"
SETTINGS = "/etc/vmjobs/config.toml"


@contextmanager
def room(grid: Grid, node: str, jobs: int, memory: int) -> Iterator[None]:
    """Have a node offer this many single-CPU jobs and MiB of memory in total.

    This works as the jobs mostly wait and write less than the GiB that each requests. The node's
    agent and startd restart before and after.
    """
    kept = grid.on(node, "cat", SETTINGS)
    offered = f"NUM_CPUS = {jobs}\nMEMORY = {memory}\nRESERVED_DISK = -{1024 * jobs}\n"
    _write(grid, node, ROOM_DROP_IN, offered)
    sized = re.sub(r"(?m)^node_memory = .*$", f"node_memory = {memory}", kept)
    _write(grid, node, SETTINGS, re.sub(r"(?m)^node_cpus = .*$", f"node_cpus = {jobs}", sized))
    try:
        _restart(grid, node)
        wait_for(lambda: _offered(grid, node) >= jobs or None, "the node to offer that much", 120)
        yield
    finally:
        grid.on(node, "rm", "-f", ROOM_DROP_IN)
        _write(grid, node, SETTINGS, kept)
        _restart(grid, node)
        wait_for(lambda: 0 < _offered(grid, node) < jobs or None, "the node to be as it was", 120)


def _write(grid: Grid, node: str, path: str, text: str) -> None:
    grid.on(node, "sh", "-c", 'printf %s "$1" >"$2"', "sh", text, path)


def _restart(grid: Grid, node: str) -> None:
    grid.on(node, "pkill", "-TERM", "-f", "vmjobs agent")  # condor_master starts it again
    restart_startd(grid, node)


def restart_startd(grid: Grid, node: str) -> None:
    """Restart the startd of a node, which cannot be reached while it is just starting."""
    command = ("condor_restart", "-daemon", "startd")
    wait_for(lambda: "Sent" in grid.on(node, *command, check=False), f"the startd of {node}", 120)


def _offered(grid: Grid, node: str) -> int:
    """CPUs that the node offers; 0 until its agent works."""
    asked = ("condor_status", f"slot1@{node}.grid", "-af", "TotalCpus", "HasVMJobs")
    found = grid.on("site", *asked, check=False).split()
    return int(float(found[0])) if found[1:] == ["true"] else 0


@contextmanager
def without_objects(grid: Grid) -> Iterator[None]:
    """Take the data of all images away from the service."""
    folder = "/var/lib/vmjobs/data/objects"
    grid.on("api", "mv", folder, f"{folder}.away")
    try:
        yield
    finally:
        grid.on("api", "sh", "-c", f"rm -rf {folder} && mv {folder}.away {folder}")


@contextmanager
def without_agent(grid: Grid, node: str) -> Iterator[None]:
    """Stop the agent of a node while the context lasts."""
    socket = "/run/vmjobs/agent.sock"
    grid.on(node, "condor_off", "-daemon", "VMJOBS_AGENT")
    try:
        wait_for(lambda: not grid.on(node, "find", socket, check=False) or None, "the agent to end", 60)
        yield
    finally:
        grid.on(node, "condor_on", "-daemon", "VMJOBS_AGENT")
        wait_for(lambda: grid.on(node, "find", socket, check=False), "the agent to be there", 120)
