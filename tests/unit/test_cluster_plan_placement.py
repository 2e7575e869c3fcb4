"""Where a plan places the VMs of clusters, where it does not because they fail there, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.kit.cluster_plans import (
    BACK,
    IMAGE,
    KINDS,
    NOW,
    OLD_IMAGE,
    ONE,
    TWO,
    at,
    cluster,
    created,
    drained,
    failing,
    node,
    runs,
    up,
    vm,
)
from vmjobs.cluster.actions import Action, CreateVm, RollBack
from vmjobs.cluster.failure_backoff import FailureBackoff, FailureBackoffs, VmFailures
from vmjobs.cluster.placement import FreeCapacity, NodeSnapshot
from vmjobs.cluster.plan import placement_request, plan
from vmjobs.cluster.snapshot import ClusterSnapshot
from vmjobs.cluster.vm_state import ClusterVmCode
from vmjobs.model import HypervisorKind

#: What a VM requests, the nodes, and the reason why none of them gets it.
REASONS: dict[str, tuple[dict[str, Any], list[NodeSnapshot], str]] = {
    "no node at all": ({}, [], "no node has registered with the service"),
    "another site": (
        {"site": "there"},
        TWO,
        "no node is of the site 'there'; there are n1 of 'here', n2 of 'here'",
    ),
    "other names": ({"nodes": ["big*"]}, ONE, "no node has a name like big*; there are n1 of 'here'"),
    "no hypervisor": (
        {"hypervisor": "qemu"},
        [node("n1", kinds=frozenset({HypervisorKind.UML})), node("n2", silent=400)],
        "no node can run it: n1 has no hypervisor for it (qemu; working there: uml), "
        "n2 has sent no recent heartbeat",
    ),
    "nothing for clusters": (
        {},
        [node("n1", memory=0), node("n2", 0)],
        "no node offers room for cluster VMs: the setting cluster_memory is 0 on n1, n2",
    ),
    "not enough": (
        {"cpus": 4, "memory": 2048},
        [node("n1", 1, cpus=1), node("n2", memory=100)],
        "no node has room: n1 lacks 3 processors and 1024 MiB of memory, n2 lacks 1948 MiB of memory; "
        "settings cluster_cpus, cluster_memory and cluster_disk of a node say what it offers",
    ),
    "many nodes": (
        {},
        [node(f"n{n}", memory=0) for n in range(7)],
        "no node offers room for cluster VMs: the setting cluster_memory is 0 on "
        "n0, n1, n2, n3, n4, and 2 more",
    ),
}


@pytest.mark.parametrize("case", REASONS, ids=list(REASONS))
def test_why_there_is_no_node(case: str) -> None:
    spec, nodes, expected = REASONS[case]
    (action,) = plan([cluster(target=1, spec=spec)], {n.name: n for n in nodes}, NOW)
    assert isinstance(action, CreateVm)
    assert (action.place.node, action.place.why) == ("", expected)


def test_patterns_and_sites_choose_nodes() -> None:
    nodes = {n.name: n for n in (node("big1"), node("big2", site="there"), node("small1"))}
    spec = {"nodes": ["big*", "huge?"], "site": "there"}
    assert plan([cluster(target=2, spec=spec)], nodes, NOW) == [created(0, "big2"), created(1, "big2")]


def test_clusters_share_what_nodes_offer() -> None:
    other = replace(cluster(target=1), name="other")
    actions = plan([cluster(target=2), other], {"n1": node("n1", 2)}, NOW)
    assert [(a.name, a.place.node) for a in actions if isinstance(a, CreateVm)] == [
        ("other-0", "n1"),
        ("vc-0", "n1"),
        ("vc-1", ""),
    ]


def closed(
    on: str, *, image: str = IMAGE, code: ClusterVmCode = ClusterVmCode.BOOT_FAILED
) -> FailureBackoff:
    """A backoff that is closed for a minute from now. on: empty for all nodes."""
    guard = FailureBackoff(image, on)
    for failed in ("n1", "n2") if not on else (on,):
        guard = guard.after_failure(VmFailures(failed, code, "no kernel", 3), NOW)
    return guard


PROVEN = FailureBackoff(IMAGE).after_success()
LATER = timedelta(seconds=61)
MOVED = [drained(0), created(1, "n2")]
UPGRADE: dict[str, Any] = {"target": 2, "generation": 2, "good": 1}

#: The cluster, the backoffs, the expected actions, and the delay before them, on two nodes.
GUARDED: dict[
    str, tuple[ClusterSnapshot, list[FailureBackoff], list[Action], *tuple[timedelta, ...]]
] = {
    "a new one goes elsewhere": (cluster(target=1), [closed("n1")], [created(0, "n2")]),
    "another image is another matter": (
        cluster(target=1),
        [closed("n1", image=OLD_IMAGE)],
        [created(0, "n1")],
    ),
    "then one is tried": (
        cluster(up(0, "n2"), up(1, "n2"), target=3),
        [closed("n1")],
        [created(2, "n1")],
        LATER,
    ),
    "one at a time": (
        cluster(target=4),
        [closed("n1")],
        [created(0, "n1"), created(1, "n2"), created(2, "n2"), created(3, "n2")],
        LATER,
    ),
    "not while one is under way": (
        cluster(runs(0), up(1, "n2"), target=3),
        [closed("n1")],
        [created(2, "n2")],
        LATER,
    ),
    "one that only fails is moved": (cluster(failing(0), target=1), [closed("n1")], MOVED),
    "not before it is closed there": (cluster(failing(0), target=1), [], []),
    "nor when it may be tried again": (cluster(failing(0), target=1), [closed("n1")], [], LATER),
    "nor where there is nowhere else": (
        cluster(failing(0), target=1),
        [closed("n1"), closed("n2")],
        [],
    ),
    "nor if the image fails everywhere": (
        cluster(failing(0), target=1),
        [closed("n1"), closed("")],
        [],
    ),
    "an upgrade with a new image tries another node first": (
        cluster(up(5, "n2"), failing(0, generation=2), **UPGRADE),
        [closed("n1")],
        MOVED,
    ),
    "so does one of the only machine": (
        cluster(failing(0, generation=2), **{**UPGRADE, "target": 1}),
        [closed("n1")],
        MOVED,
    ),
    "one with a known image is at fault itself": (
        cluster(up(5, "n2"), failing(2, generation=2, why="no kernel"), **UPGRADE),
        [closed("n1"), PROVEN],
        [RollBack("vc", BACK), drained(2)],
    ),
    "unless it is the node's": (
        cluster(up(5, "n2"), failing(0, generation=2, code=ClusterVmCode.NODE_FAILED), **UPGRADE),
        [closed("n1"), PROVEN],
        MOVED,
    ),
    "or others of it came up": (
        cluster(
            up(5, "n2"), up(6, "n2", generation=2), failing(0, generation=2), **{**UPGRADE, "target": 3}
        ),
        [closed("n1"), PROVEN],
        MOVED,
    ),
    "an upgrade whose image fails everywhere is taken back": (
        cluster(up(5, "n2"), failing(2, generation=2, why="no kernel"), **UPGRADE),
        [closed("n1"), closed("")],
        [RollBack("vc", BACK), drained(2)],
    ),
}


@pytest.mark.parametrize("case", GUARDED, ids=list(GUARDED))
def test_where_vms_only_fail(case: str) -> None:
    there, guards, expected, *later = GUARDED[case]
    after = sum(later, timedelta())
    nodes = {name: node(name, silent=-after.total_seconds()) for name in ("n1", "n2")}
    assert plan([there], nodes, NOW + after, FailureBackoffs(guards, NOW + after)) == expected


def test_why_a_guarded_node_is_not_chosen() -> None:
    nodes = {"n1": node("n1"), "n2": node("n2", 0), "n3": node("n3")}
    there = cluster(target=1)
    guards = FailureBackoffs([closed("n1"), closed("n3", code=ClusterVmCode.KERNEL_PANIC)], NOW)
    (action,) = plan([there], nodes, NOW, guards)
    assert isinstance(action, CreateVm)
    short = "sha256:222222222222…"
    assert action.place.code is ClusterVmCode.GUARDED
    assert action.place.why == (
        f"n1: 3 VMs of {short} failed there in a row, last: BOOT_FAILED no kernel; next try at "
        "12:01:00 UTC; n2 lacks 1 processors and 1024 MiB of memory and 1000 MiB of disk; "
        f"n3: 3 VMs of {short} failed there in a row, last: KERNEL_PANIC no kernel; next try at "
        "12:01:00 UTC"
    )
    (wide,) = plan([there], nodes, NOW, FailureBackoffs([closed("")], NOW))
    assert isinstance(wide, CreateVm)
    assert "failed on n1, n2, and none ever came up" in wide.place.why
    assert wide.place.why.count("next try") == 1


def test_clusters_of_the_same_image_try_one_vm_at_a_time() -> None:
    other = replace(cluster(target=1), name="other")
    for when, nodes in ((NOW - LATER, ["", ""]), (NOW + LATER, ["n1", ""])):
        guards = FailureBackoffs([closed("n1")], when)
        actions = plan([cluster(target=1), other], {"n1": node("n1")}, NOW, guards)
        assert [a.place.node for a in actions if isinstance(a, CreateVm)] == nodes


class Looked(frozenset[HypervisorKind]):
    """The hypervisors that work on a node; counts how often the plan checks them."""

    times = 0

    def __and__(self, other: object) -> frozenset[HypervisorKind]:
        Looked.times += 1
        return super().__and__(other)  # type: ignore[operator]


@pytest.mark.parametrize("crowd", ["pending", "missing", "failing"])
def test_where_there_is_no_room_each_node_is_looked_at_once(
    crowd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Looked, "times", 0)
    nodes = {f"n{n}": node(f"n{n}", 1, kinds=Looked(KINDS)) for n in range(20)}
    nodes["m"] = node("m", 500)
    closed = FailureBackoff(IMAGE, "m", failures=3, until=at(-600), nodes=("m",))
    open_guards = FailureBackoffs([closed, replace(closed, node="")], NOW)
    kinds: dict[str, Callable[[int], Any]] = {
        "pending": vm,
        "missing": up,
        "failing": lambda n: failing(n, "m"),
    }
    made = kinds[crowd]
    vms = [] if crowd == "missing" else [made(n) for n in range(500)]
    there = [replace(up(1000 + n, f"n{n}"), name=f"vc-{1000 + n}") for n in range(20)]
    wanted = cluster(*vms, *there, target=520)
    actions = plan([wanted], nodes, NOW, open_guards)
    assert Looked.times <= 20
    assert len(actions) in {0, 500}


def test_a_vm_goes_where_its_processors_are() -> None:
    uml, both = frozenset({HypervisorKind.UML}), KINDS | {HypervisorKind.QEMU}
    wanted = placement_request(cluster(spec={"cpus": 2}).spec, both, IMAGE)
    place = FreeCapacity([node("n1", kinds=uml)]).place(wanted)
    assert (place.node, place.code) == ("", ClusterVmCode.NO_NODE)
    assert "n1 has no hypervisor for it (qemu; working there: uml)" in place.why
    assert FreeCapacity([node("n1", kinds=uml), node("n2", kinds=both)]).place(wanted).node == "n2"
