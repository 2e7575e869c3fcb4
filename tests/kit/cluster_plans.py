"""Snapshots of nodes, clusters and their VMs to plan for, and actions that a plan may have."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from vmjobs.cluster.actions import CreateVm, SetGoal
from vmjobs.cluster.placement import NodeSnapshot, Placement, VmRequest
from vmjobs.cluster.snapshot import ClusterSnapshot, ClusterVmSnapshot
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.vm_state import ClusterVmCode, Goal, Phase
from vmjobs.model import HypervisorKind

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
IMAGE, OLD_IMAGE = f"sha256:{'2' * 64}", f"sha256:{'1' * 64}"
KINDS = frozenset({HypervisorKind.UML, HypervisorKind.QEMU})
SMALL = VmRequest(1, 1024, 1000)
PLAIN = {"image": "worker", "size": 0, "memory": 1024, "disk": 1000, "join_seconds": 100}
BACK = "generation 2 failed (vc-2 failed 3 times: BOOT_FAILED: no kernel): back to generation 1"


def at(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def node(name: str, machines: int = 10, silent: float = 0, **more: Any) -> NodeSnapshot:
    """A node with room for so many VMs of one processor."""
    values: dict[str, Any] = {
        "site": "here",
        "kinds": KINDS,
        "cpus": machines,
        "memory": 1024 * machines,
        "disk": 1000 * machines,
        "alive": silent <= 300,
        "heard": at(silent),
    }
    return NodeSnapshot(name=name, **{**values, **more})


def vm(number: int, on: str = "", **more: Any) -> ClusterVmSnapshot:
    """A VM of the cluster ``vc``; its id is its name."""
    values = {"id": f"vc-{number}", "name": f"vc-{number}", "need": SMALL, "generation": 1, "node": on}
    return ClusterVmSnapshot(**{**values, "image": IMAGE, **more})


def runs(number: int, on: str = "n1", **more: Any) -> ClusterVmSnapshot:
    values = {"phase": Phase.RUNNING, "incarnation": 1, "waiting": at(10)}
    return vm(number, on, **{**values, **more})


def up(number: int, on: str = "n1", **more: Any) -> ClusterVmSnapshot:
    return runs(number, on, **{"advertised": 1, "admitted": 1, "waiting": None, **more})


def failing(number: int, on: str = "n1", **more: Any) -> ClusterVmSnapshot:
    values = {"phase": Phase.WAITING, "incarnation": 3, "failures": 3, "withdrawn": 3}
    return vm(number, on, **{**values, "code": ClusterVmCode.BOOT_FAILED, **more})


def cluster(*vms: ClusterVmSnapshot, target: int = 0, **more: Any) -> ClusterSnapshot:
    spec = ClusterSpec.model_validate({"name": "vc", **PLAIN, **more.pop("spec", {})})
    values = {"kinds": KINDS, "generation": 1, "target": target, "vms": vms}
    values |= {"image": IMAGE, "good": more.get("generation", 1)}
    return ClusterSnapshot(name="vc", spec=spec, **{**values, **more})


def created(number: int, on: str) -> CreateVm:
    return CreateVm("vc", f"vc-{number}", Placement(on))


def drained(number: int) -> SetGoal:
    return SetGoal(f"vc-{number}", Goal.DRAIN)


ONE, TWO = [node("n1")], [node("n1"), node("n2")]
