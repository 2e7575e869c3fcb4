"""From an idle job to its start on a VM that it woke, over such a VM started by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.clusters import (
    IMAGE,
    bring_image,
    cluster,
    cluster_spec,
    fresh,
    hosts,
    join_by_hand,
    operator,
    since,
    watching,
)
from bench.figures import Finding, compare, in_turns, spread
from tests.kit.grid import Grid, wait_for
from vmjobs.client import Client
from vmjobs.cluster.spec import SizeRange
from vmjobs.cluster.vm_state import ClusterVmState
from vmjobs.model import now

TARGET = 2.5
OFFER_SECONDS = 120.0

#: Submitted at the site itself: another benchmark measures what Condor-C adds.
JOB = """\
executable = /bin/true
transfer_executable = false
should_transfer_files = YES
when_to_transfer_output = ON_EXIT
log = job.log
request_cpus = 1
request_memory = 64
request_disk = 1024
requirements = TARGET.VirtualCluster == "{cluster}"
queue
"""

#: Each part and what ends it: a state of the VM, or something seen in the pool.
PARTS = (
    ("the service has noticed", "SCALED"),
    ("the agent has heard", ClusterVmState.STAGING),
    ("the guest is ready", ClusterVmState.JOINING),
    ("in the pool", "in the pool"),
    ("the service has seen that", ClusterVmState.PROBING),
    ("the probe ran, and the service knows", ClusterVmState.UP),
    ("the job runs", "running"),
)


def cluster_wake(grid: Grid, pairs: int) -> Iterator[Finding]:
    digest = grid.images.resolve(IMAGE)
    with operator(grid) as api:
        bring_image(grid, api)
        join_by_hand(grid, digest, 1)  # fills the cache; not counted
        found = in_turns(pairs, lambda: _wake(grid, api), lambda: join_by_hand(grid, digest, 1))
    seen = [(told["the job runs"], theirs) for told, theirs in found]
    details = {"seconds until": {part: spread([told[part] for told, _ in found]) for part, _ in PARTS}}
    what = "idle job to its begin on a woken VM"
    yield compare(0, what, seen, TARGET, measure="job / by hand, in the pool", details=details)


def _wake(grid: Grid, api: Client) -> dict[str, float]:
    """Seconds from an idle job until the end of each part."""
    name = fresh("w")
    with cluster(api, cluster_spec(name, SizeRange(min=0, max=1))):
        shown = f'VMJobsCluster == "{name}" && Offline =?= true'
        wait_for(
            lambda: grid.on("site", "condor_status", "-constraint", shown, "-af", "Name").strip(),
            "the pool to show the cluster",
            OFFER_SECONDS,
        )
        with watching(grid, hosts(name, 1), JOB.format(cluster=name)) as watched:
            began = watched.until("idle")
            by_clock = now().timestamp() - (time.monotonic() - began)
            found = {"running": watched.until("running") - began}
            found["in the pool"] = watched.all_in_the_pool(hosts(name, 1)) - began
            events = list(api.clusters.events(name))
        found |= since(events, now().fromtimestamp(by_clock, now().tzinfo))
        # The history lacks a state that ended before the service heard of it, but has the next one.
        told, later = {}, found["running"]
        for part, key in reversed(PARTS):
            told[part] = later = found.get(key, later)
        return told
