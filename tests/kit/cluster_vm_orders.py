"""Orders and records of cluster VMs, for tests."""

from __future__ import annotations

from vmjobs.agent.cluster_vms.record import ClusterVmRecord
from vmjobs.cluster.vm_state import Goal
from vmjobs.cluster.wire import ClusterVmOrder, PoolAddress

NOW = 1_800_000_000.0
POOL = PoolAddress(name="site", collector="pool.site.grid", trust_domain="site.grid")


def cluster_vm_order(number: int = 0, **fields: object) -> ClusterVmOrder:
    values: dict[str, object] = {
        "id": f"{number:032x}",
        "cluster": "debian",
        "name": f"debian-{number}",
        "goal": Goal.RUN,
        "image": "sha256:" + "0" * 64,
        "cpus": 1,
        "memory": 128,
        "disk": 64,
        "pool": POOL,
        "boot_seconds": 60,
        "drain_seconds": 1000,
    }
    return ClusterVmOrder.model_validate({**values, **fields})


def cluster_vm_record(order: ClusterVmOrder | None = None, **fields: object) -> ClusterVmRecord:
    """A record of a cluster VM, as of ``NOW``."""
    return ClusterVmRecord.model_validate(
        {"order": order or cluster_vm_order(), "since": NOW - 100, **fields}
    )
