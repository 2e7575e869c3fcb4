"""Times virtual clusters and workers started by hand, on a running grid."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO

from condor.pool.tokens import user_name_of
from tests.kit.grid import NODES, Grid, wait_for
from tests.kit.grid_clusters import gone
from vmjobs.client import Client
from vmjobs.cluster.pool import PoolVm
from vmjobs.cluster.spec import ClusterSpec, SizeRange
from vmjobs.cluster.wire import ClusterEvent
from vmjobs.errors import Conflict

HERE = Path(__file__).parent
#: Of each VM, in MiB.
MEMORY, DISK = 256, 256
IMAGE = "worker"
#: Seconds that VMs may take to join the pool, on a host that has other work.
PATIENCE = 900.0
_BY_HAND = "/tmp/vmjobs-bench"  # noqa: S108


@contextmanager
def operator(grid: Grid) -> Iterator[Client]:
    """A client of the API with the rights of an operator."""
    token = grid.admin_token.read_text("ascii").strip()
    with Client(grid.url, token) as api:
        yield api


def fresh(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex[:8]}"


@contextmanager
def cluster(api: Client, spec: ClusterSpec) -> Iterator[float]:
    """Declare a cluster, yield the time of that (CLOCK_MONOTONIC), and delete it at the end."""
    began = time.monotonic()
    api.clusters.put(spec)
    try:
        yield began
    finally:
        with suppress(Conflict):
            api.clusters.delete(spec.name, "now")
        wait_for(lambda: gone(api, spec.name) or None, f"cluster {spec.name} to go", PATIENCE)


def bring_image(grid: Grid, api: Client) -> None:
    """Bring the image to all nodes, so that no measurement includes a download."""
    name, size = fresh("c"), len(NODES)
    with watching(grid, hosts(name, size)) as watched, cluster(api, cluster_spec(name, size)):
        watched.all_in_the_pool(hosts(name, size))


@dataclass
class Watched:
    """What :mod:`cluster_watch` has seen, with times of CLOCK_MONOTONIC in seconds."""

    seen: dict[str, float] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _over: str | None = None

    def note(self, line: str) -> None:
        told = json.loads(line)
        with self._changed:
            key = told["what"] if told["what"] != "in the pool" else f"in the pool: {told['name']}"
            self.seen[key] = told["at"]
            self._changed.notify_all()

    def end(self, why: str) -> None:
        """Record that there are no more lines."""
        with self._changed:
            self._over = why
            self._changed.notify_all()

    def until(self, what: str) -> float:
        """Wait until this was seen; return when that was.

        Raises:
            RuntimeError: it was not seen in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: what in self.seen or self._over is not None)
            if what not in self.seen:
                raise RuntimeError(f"{what}: {self._over}")
            return self.seen[what]

    def all_in_the_pool(self, vms: Sequence[str]) -> float:
        """Wait until all these VMs are in the pool; return when the last one joined."""
        return max(self.until(f"in the pool: {name}") for name in vms)


def hosts(cluster: str, size: int) -> list[str]:
    return [f"{cluster}-{number}.vc" for number in range(size)]


@contextmanager
def watching(grid: Grid, vms: Sequence[str], job: str = "") -> Iterator[Watched]:
    """Submit the job, if there is one, and watch for its start and for these VMs in the pool."""
    argv = ["docker", "exec", "-i", "-u", "vmjobs", "-e", f"JOB={job}", grid.container("site")]
    process = subprocess.Popen(
        [*argv, "python3", "-", str(PATIENCE), *vms],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watched = Watched()
    assert process.stdin is not None
    with process.stdin as sink:
        sink.write((HERE / "cluster_watch.py").read_text())

    def listen() -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            watched.note(line)
        watched.end(process.stderr.read().strip() or "the watch has ended")

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        watched.until("watching")
        yield watched
    finally:
        process.kill()
        process.wait()


@contextmanager
def _prepared(grid: Grid, node: str, digest: str, names: Sequence[str]) -> Iterator[IO[str]]:
    """Prepare VMs on a node, and yield the pipe on which a line starts them."""
    container = grid.container(node)
    grid.on(node, "mkdir", "-p", f"{_BY_HAND}/bench")
    for file in ("raw_boot.py", "cluster_by_hand.py"):
        copy = ["docker", "cp", str(HERE / file), f"{container}:{_BY_HAND}/bench"]
        subprocess.run(copy, check=True, capture_output=True)
    vms = [PoolVm(name, 1, uuid.uuid4().hex) for name in names]
    tokens = [f"{vm.name}={_token(grid, vm)}={vm.id}" for vm in vms]
    program = ["python3", "-m", "bench.cluster_by_hand", "/var/lib/vmjobs/agent/images", digest]
    program += [str(MEMORY), str(DISK), "site.grid", "grid", *tokens]
    process = subprocess.Popen(
        ["docker", "exec", "-i", "-w", _BY_HAND, "-u", "vmjobs-agent", container, *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        if process.stdout.readline() != "prepared\n":
            raise RuntimeError(f"VMs could not be prepared by hand on {node}")
        try:
            yield process.stdin
        finally:
            process.stdin.close()
            process.wait(PATIENCE)


def _token(grid: Grid, vm: PoolVm) -> str:
    words = ["-key", "site", "-identity", f"{user_name_of(vm)}@grid", "-lifetime", "3600"]
    return grid.on("site", "condor_token_create", *words).strip()


def join_by_hand(grid: Grid, digest: str, count: int) -> float:
    """Start VMs by hand, all at once; returns the seconds until the last one is in the pool."""
    cluster = fresh("h")
    names = [f"{cluster}-{number}" for number in range(count)]
    with ExitStack() as stack:
        pipes = []
        for place, node in enumerate(NODES):
            if mine := names[place :: len(NODES)]:
                pipes.append(stack.enter_context(_prepared(grid, node, digest, mine)))
        watched = stack.enter_context(watching(grid, hosts(cluster, count)))
        began = time.monotonic()
        for pipe in pipes:
            pipe.write("go\n")
            pipe.flush()
        return watched.all_in_the_pool(hosts(cluster, count)) - began


def since(events: Sequence[ClusterEvent], began: datetime) -> dict[str, float]:
    """Seconds from ``began`` until all of a cluster's VMs had been in each state.

    By the service's clock.
    """
    first: dict[tuple[str, str], datetime] = {}
    for event in events:
        first.setdefault((event.state, event.member), event.time)
    found: dict[str, float] = {}
    for (state, _), moment in first.items():
        found[state] = max(found.get(state, 0.0), (moment - began).total_seconds())
    return found


def cluster_spec(name: str, size: int | SizeRange) -> ClusterSpec:
    return ClusterSpec(name=name, image=IMAGE, size=size, memory=MEMORY, disk=DISK)
