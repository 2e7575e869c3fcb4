"""Benchmark 11: time until a cluster's N VMs are in the pool, over N VMs started by hand."""

from __future__ import annotations

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
from vmjobs.model import now

SIZES = (1, 2, 4)
TARGET = 1.2
UP_SECONDS = 300.0


def cluster_start(grid: Grid, pairs: int) -> Iterator[Finding]:
    digest = grid.images.resolve(IMAGE)
    with operator(grid) as api:
        bring_image(grid, api)
        join_by_hand(grid, digest, max(SIZES))  # fills the cache; not counted
        for size in SIZES:
            yield _compare(grid, api, digest, size, pairs)


def _compare(grid: Grid, api: Client, digest: str, size: int, pairs: int) -> Finding:
    found = in_turns(pairs, lambda: _ours(grid, api, size), lambda: join_by_hand(grid, digest, size))
    seen = [(ours, theirs) for (ours, _), theirs in found]
    parts = [told for (_, told), _ in found]
    details = {
        "seconds until the last VM is": {
            state: spread([told[state] for told in parts if state in told]) for state in parts[0]
        }
    }
    what = f"until {size} of a cluster are in the pool"
    return compare(11, what, seen, TARGET, measure="cluster / by hand", details=details)


def _ours(grid: Grid, api: Client, size: int) -> tuple[float, dict[str, float]]:
    """Seconds until all VMs are in the pool, and until they were in each state."""
    name = fresh("b")
    with watching(grid, hosts(name, size)) as watched:
        declared = now()
        with cluster(api, cluster_spec(name, size)) as began:
            seconds = watched.all_in_the_pool(hosts(name, size)) - began
            wait_for(lambda: api.clusters.get(name).up == size or None, f"{size} to be UP", UP_SECONDS)
            return seconds, since(list(api.clusters.events(name)), declared)
