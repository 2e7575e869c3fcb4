"""What can be done to a grid under a virtual cluster, and users' jobs that run there meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grid_kit import Grid, healthy, run, wait_for
from test_cluster_grid import Submitter

from vmjobs.client import Client
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.wire import Member

#: Seconds in which a job waits for a machine that does not answer any more.
LEASE = 20
#: Seconds in which a job comes through whatever is broken, once that is mended.
LATE = 240.0
#: Takes what a report is to say, by name.
Tell = Callable[[str, object], None]


def declared(name: str, size: int = 2, **fields: object) -> ClusterSpec:
    words = {"image": "worker", "memory": 512, "disk": 512, **fields}
    return ClusterSpec.model_validate({"name": name, "size": size, **words})


class Running:
    """A user's job that has begun in a machine of a cluster. tell: takes what the report says of it."""

    def __init__(
        self, grid: Grid, operator: Client, tell: Tell, cluster: str, seconds: int = 10
    ) -> None:
        self.grid, self.operator, self.cluster, self._tell = grid, operator, cluster, tell
        self.user = Submitter(grid)
        script = f"echo ran on $(cat /proc/sys/kernel/hostname); sleep {seconds}; echo done"
        self.job = self.user.submit(cluster, script, lease=LEASE)
        self.member = wait_for(self._busy, "the job to run in a machine", 120)
        self.began = time.monotonic()
        #: The member that it ended in.
        self.ended_in = ""

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
        took = time.monotonic() - self.began
        assert (began.rpartition(" ")[0], end) == ("ran on", "done")
        self.ended_in = began.rpartition(" ")[2].removesuffix(".vc")
        told = self.user("cat", f"{self.user.folder}/log")
        assert told.count(f"005 ({int(self.job):03d}.") == 1, told
        starts = self.user.starts(self.job)
        self._tell("job", (round(took), starts))
        return starts


class Volley(Submitter):
    """Many jobs of one user, asked about all at once."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.jobs: list[str] = []

    def fire(self, cluster: str) -> None:
        """One more."""
        self.jobs.append(self.submit(cluster, "sleep 1; echo done", lease=LEASE))

    def starts(self) -> list[int]:
        """Wait until all have ended, well and once; how often the site started each."""
        wait_for(
            lambda: not self("condor_q", *self.jobs, "-af", "ClusterId") or None, "all to end", LATE
        )
        found = self("sh", "-c", f"cat {self.folder}/out.*")
        assert found == "done\n" * len(self.jobs), f"{found.count('done')} of {len(self.jobs)} jobs"
        told = self("cat", f"{self.folder}/log")
        assert [told.count(f"005 ({int(job):03d}.") for job in self.jobs] == [1] * len(self.jobs)
        remote = self("condor_history", *self.jobs, "-af", "GridJobId").split()[3::4]
        # What has ended stays in the site's queue for a while, and may go from there at any time: asked
        # last, the queue could have it no more, and the history had not had it yet.
        asked = (*remote, "-af:j", "NumShadowStarts")
        lines = self.grid.on("site", "condor_q", *asked).splitlines()
        lines += self.grid.on("site", "condor_history", *asked).splitlines()
        known = dict(line.split() for line in lines)
        assert sorted(known) == sorted(remote)
        return [int(starts) for starts in known.values()]


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


def as_root(grid: Grid, service: str, *command: str) -> str:
    """Do in a container what nobody in it may: to its network and its mounts."""
    there = f"container:{grid.container(service)}"
    run_there = ("docker", "run", "--rm", "--network", there, "--pid", there, "--user", "root")
    rights = ("--cap-add", "NET_ADMIN", "--cap-add", "SYS_ADMIN", "--cap-add", "SYS_PTRACE")
    enter = ("--entrypoint", "nsenter", f"{grid.project}/node", "--target", "1", "--mount")
    return run(*run_there, *rights, "--security-opt", "apparmor=unconfined", *enter, *command)


@contextmanager
def silent(grid: Grid, service: str) -> Iterator[None]:
    """Have every packet from and to a node vanish; all that runs there runs on."""
    cut = "for way in INPUT:-i OUTPUT:-o; do iptables $1 ${way%:*} ! ${way#*:} lo -j DROP; done"
    as_root(grid, service, "sh", "-c", cut, "-", "-I")
    try:
        yield
    finally:
        as_root(grid, service, "sh", "-c", cut, "-", "-D")


#: Where an agent keeps what there is of members, and a file there that takes all room.
MEMBERS = "/var/lib/vmjobs/agent/members"
FILLER = f"{MEMBERS}/filler"


@contextmanager
def small_disk(grid: Grid, service: str, mib: int) -> Iterator[None]:
    """Have members of a node, which has none, be on a disk of so many MiB."""
    there = grid.on(service, "find", MEMBERS, "-mindepth", "1", "-type", "d")
    assert not there, f"machines of other clusters are on {service}; vmjobs cluster delete NAME --now"
    owner = grid.on(service, "stat", "-c", "uid=%u,gid=%g", MEMBERS).strip()
    options = f"size={mib}m,mode=0700,{owner}"
    as_root(grid, service, "mount", "-t", "tmpfs", "-o", options, "tmpfs", MEMBERS)
    try:
        yield
    finally:
        as_root(grid, service, "umount", "--lazy", MEMBERS)


@contextmanager
def without_objects(grid: Grid) -> Iterator[None]:
    """Have the service without what images are made of."""
    folder = "/var/lib/vmjobs/data/objects"
    grid.on("api", "mv", folder, f"{folder}.away")
    try:
        yield
    finally:
        grid.on("api", "sh", "-c", f"rm -rf {folder} && mv {folder}.away {folder}")
