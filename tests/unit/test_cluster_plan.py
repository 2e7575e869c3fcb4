"""The actions for clusters in each situation: the table of ``vmjobs.cluster.plan``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from vmjobs.cluster.actions import (
    Action,
    AllowJobs,
    AssignNode,
    CompleteRollout,
    CreateVm,
    DeleteCluster,
    DeleteVm,
    PauseRollout,
    RemoveAd,
    ReplaceVm,
    RollBack,
    SetGoal,
    SetPending,
)
from vmjobs.cluster.failure_backoff import FailureBackoff, FailureBackoffs, VmFailures
from vmjobs.cluster.placement import FreeCapacity, NodeSnapshot, Placement, VmRequest
from vmjobs.cluster.plan import AD_LIFETIME, NODE_GIVEN_UP_AFTER, placement_request, plan
from vmjobs.cluster.pool import ProbeState
from vmjobs.cluster.snapshot import ClusterSnapshot, ClusterVmSnapshot
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.vm_state import ClusterVmCode, Goal, Phase
from vmjobs.model import HypervisorKind

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
IMAGE, OLD_IMAGE = f"sha256:{'2' * 64}", f"sha256:{'1' * 64}"
KINDS = frozenset({HypervisorKind.UML, HypervisorKind.QEMU})
SMALL = VmRequest(1, 1024, 1000)
PLAIN = {"image": "worker", "size": 0, "memory": 1024, "disk": 1000, "join_seconds": 100}


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


def waits(number: int, **more: Any) -> ClusterVmSnapshot:
    return vm(number, "n1", phase=Phase.WAITING, **more)


def boots(number: int, **more: Any) -> ClusterVmSnapshot:
    return vm(number, "n1", phase=Phase.BOOTING, **more)


def joined(number: int, probe: ProbeState, **more: Any) -> ClusterVmSnapshot:
    return runs(number, advertised=1, probe=probe, **more)


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


def condemned(code: ClusterVmCode, why: str) -> ReplaceVm:
    return ReplaceVm("vc-0", 1, code, why)


def drained(number: int) -> SetGoal:
    return SetGoal(f"vc-{number}", Goal.DRAIN)


def gone(number: int) -> DeleteVm:
    return DeleteVm(f"vc-{number}")


ONE, TWO = [node("n1")], [node("n1"), node("n2")]
LOST = [node("n1", silent=400), node("n2")]
DRAIN: dict[str, Any] = {"goal": Goal.DRAIN}

BACK = "generation 2 failed (vc-2 failed 3 times: BOOT_FAILED: no kernel): back to generation 1"

#: The cluster, the expected actions, and the nodes, if not one with room.
TABLE: dict[str, tuple[ClusterSnapshot, list[Action], *tuple[Sequence[NodeSnapshot], ...]]] = {
    "all is well": (cluster(up(0), up(1), target=2), []),
    # -- size
    "the first machines are spread": (cluster(target=2), [created(0, "n1"), created(1, "n2")], TWO),
    "then where most memory is left": (
        cluster(target=1),
        [created(0, "n2")],
        [node("n1", 3), node("n2", 4)],
    ),
    "the lowest number is used again": (cluster(up(1), target=2), [created(0, "n1")]),
    "a name is free once its machine has gone": (cluster(up(0, **DRAIN), target=1), [created(1, "n1")]),
    "one that came late gets a node": (cluster(vm(0), target=1), [AssignNode("vc-0", "n1")]),
    "smaller: the highest number goes": (cluster(up(0), up(1), target=1), [drained(1)]),
    "smaller: rather one that is not busy": (cluster(up(0), up(1, busy=True), target=1), [drained(0)]),
    "smaller: rather one that is not up": (cluster(runs(0), up(1), target=1), [drained(0)]),
    "smaller: rather one that waits for its next try": (
        cluster(failing(0), runs(1), up(2), target=2),
        [drained(0)],
    ),
    "smaller: before all one that has no node": (cluster(vm(0), failing(1), target=1), [gone(0)]),
    # -- room
    "what is ending still has its room": (
        cluster(up(0, **DRAIN), up(1, goal=Goal.STOP, phase=Phase.STOPPING), vm(2), target=1),
        [
            SetPending(
                "vc-2",
                ClusterVmCode.NO_ROOM,
                "no node has room: n1 lacks 1 processors and 1024 MiB of memory and 1000 MiB of disk; "
                "settings cluster_cpus, cluster_memory and cluster_disk of a node say what it offers",
            )
        ],
        [node("n1", 2)],
    ),
    "the same reason is told once": (
        cluster(
            vm(0, code=ClusterVmCode.NO_NODE, why="no node has registered with the service"),
            target=1,
        ),
        [],
        [],
    ),
    # -- in the pool
    "a probe job ran": (cluster(joined(0, ProbeState.RAN), target=1), [AllowJobs("vc-0", 1)]),
    "a probe job waits": (cluster(joined(0, ProbeState.WAITING), target=1), []),
    "a probe job failed": (
        cluster(joined(0, ProbeState.FAILED), target=1),
        [
            condemned(
                ClusterVmCode.PROBE_FAILED,
                "its probe job failed: the VM is in the pool but runs no jobs",
            )
        ],
    ),
    "it did not join in time": (
        cluster(runs(0, waiting=at(101)), target=1),
        [condemned(ClusterVmCode.JOIN_TIMED_OUT, "the VM did not join the pool within 100 s")],
    ),
    "its probe did not run in time": (
        cluster(joined(0, ProbeState.WAITING, waiting=at(101)), target=1),
        [condemned(ClusterVmCode.JOIN_TIMED_OUT, "its probe job did not run within 100 s")],
    ),
    "a machine is condemned once": (cluster(runs(0, waiting=at(101), condemned=1), target=1), []),
    "a pool that does not answer condemns nobody": (cluster(runs(0, waiting=None), target=1), []),
    "the ad of another machine is not its ad": (
        cluster(runs(0, incarnation=2, withdrawn=1, advertised=3, probe=ProbeState.RAN), target=1),
        [],
    ),
    "an ad that vanished has time to come back": (
        cluster(up(0, advertised=0, waiting=at(101)), target=1),
        [],
    ),
    "it does not come back": (
        cluster(up(0, advertised=0, waiting=NOW - AD_LIFETIME - timedelta(seconds=1)), target=1),
        [condemned(ClusterVmCode.JOIN_TIMED_OUT, "the VM has been missing from the pool for 900 s")],
    ),
    "a machine that ended is withdrawn": (
        cluster(waits(0, incarnation=1, advertised=1), target=1),
        [RemoveAd("vc-0")],
    ),
    "so is one that nobody has seen in the pool: it may have a token": (
        cluster(waits(0, incarnation=2, withdrawn=1), target=1),
        [RemoveAd("vc-0")],
    ),
    "a pool that was told is told once": (cluster(waits(0, incarnation=2, withdrawn=2), target=1), []),
    "and again if it is there after all": (
        cluster(boots(0, incarnation=2, withdrawn=1, advertised=1), target=1),
        [RemoveAd("vc-0")],
    ),
    "one may join before its agent says that it runs": (
        cluster(boots(0, incarnation=2, advertised=2, withdrawn=1), target=1),
        [],
    ),
    # -- lost nodes
    "another machine takes the place of a lost one": (
        cluster(up(0), target=1),
        [created(1, "n2")],
        LOST,
    ),
    "if there is room": (cluster(up(0), target=1), [], [node("n1", silent=400), node("n2", 0)]),
    "one lost and one missing: who is missing is shown": (
        cluster(up(0), target=2),
        [
            CreateVm(
                "vc",
                "vc-1",
                Placement(
                    code=ClusterVmCode.NO_NODE,
                    why="no node can run it: n1 has sent no recent heartbeat",
                ),
            )
        ],
        [node("n1", silent=400)],
    ),
    "a lost one is not surplus": (cluster(up(0), up(1, "n2"), target=1), [], LOST),
    "a node that does not come back is given up": (
        cluster(up(0), up(1, "n2"), target=1),
        [drained(0)],
        [node("n1", silent=NODE_GIVEN_UP_AFTER.total_seconds()), node("n2")],
    ),
    "so is one that nobody knows": (cluster(up(0, "n9"), up(1), target=1), [drained(0)]),
    "a lost one that was to stop is forgotten": (cluster(up(0, goal=Goal.STOP)), [gone(0)], LOST),
    "a lost one that drains has its time": (cluster(up(0, **DRAIN)), [], LOST),
    "and then is forgotten": (cluster(up(0, **DRAIN), spec={"drain_seconds": 399}), [gone(0)], LOST),
    # -- drained and deleted
    "one that is gone is forgotten and replaced": (
        cluster(vm(0, "n1", phase=Phase.GONE), target=1),
        [gone(0), created(1, "n1")],
    ),
    "a draining cluster": (
        cluster(up(0), vm(1), up(2, **DRAIN), target=3, draining=True),
        [drained(0), gone(1)],
    ),
    "a cluster that is deleted now": (
        cluster(up(0), up(1, **DRAIN), target=3, deleting=Goal.STOP),
        [SetGoal("vc-0", Goal.STOP), SetGoal("vc-1", Goal.STOP)],
    ),
    "a cluster goes with its last member": (
        cluster(target=3, deleting=Goal.DRAIN),
        [DeleteCluster("vc")],
    ),
    # -- a new declaration
    "the first one of an old generation": (cluster(up(0), up(1), target=2, generation=2), [drained(1)]),
    "its successor is made at once": (
        cluster(up(0), up(1, **DRAIN), target=2, generation=2),
        [created(2, "n1")],
    ),
    "the next one waits until that is up": (
        cluster(up(0), runs(2, generation=2), target=2, generation=2),
        [],
    ),
    "and until the one before has gone": (
        cluster(up(0), up(2, generation=2), up(1, **DRAIN), target=2, generation=2),
        [],
    ),
    "then it follows": (cluster(up(0), up(2, generation=2), target=2, generation=2), [drained(0)]),
    "not while another one is down that was up": (
        cluster(up(0), up(1, phase=Phase.WAITING, failures=1), target=2, generation=2),
        [RemoveAd("vc-1")],
    ),
    "not while another one is lost": (cluster(up(0), up(1, "n2"), target=1, generation=2), [], LOST),
    "those that never were up hold up nothing, and go first": (
        cluster(up(0), failing(1), failing(2), target=3, generation=2),
        [drained(2)],
    ),
    "those without a node are simply made anew": (
        cluster(up(0), vm(1), target=2, generation=2),
        [gone(1), created(2, "n1")],
    ),
    "a failing successor ends it": (
        cluster(up(0), failing(2, generation=2, why="no kernel"), target=2, generation=2),
        [
            PauseRollout(
                "vc",
                "the rollout is paused: vc-2 of generation 2 failed 3 times "
                "(BOOT_FAILED: no kernel); 1 of earlier generations stay. Correct the declaration, or "
                "apply the earlier one again",
            )
        ],
    ),
    "which is told once": (
        cluster(up(0), failing(2, generation=2), target=2, generation=2, stalled=2),
        [],
    ),
    # -- rollback
    "all is up: remembered": (cluster(up(0), target=1, good=0), [CompleteRollout("vc")]),
    "of each generation": (
        cluster(up(0, generation=2), target=1, generation=2, good=1),
        [CompleteRollout("vc")],
    ),
    "not all of it": (
        cluster(up(0), up(1, **DRAIN), up(2, generation=2), target=2, generation=2, good=1),
        [],
    ),
    "not while one is lost": (
        cluster(up(0), up(1, "n2"), target=1, good=0),
        [],
        [node("n1"), node("n2", silent=400)],
    ),
    "nothing is up where nothing is wanted": (cluster(good=0), []),
    "a failing successor takes it back": (
        cluster(
            up(0),
            up(1, generation=2),
            failing(2, generation=2, why="no kernel"),
            runs(3, generation=2),
            target=4,
            generation=2,
            good=1,
        ),
        [RollBack("vc", BACK), drained(2), drained(3)],
    ),
    "then those of the failed one that are up follow, one at a time": (
        cluster(up(0), up(1, generation=2), up(2, generation=2), target=3, generation=1, good=1),
        [drained(2)],
    ),
    "the only machine fails": (
        cluster(failing(2, generation=2, why="no kernel"), target=1, generation=2, good=1),
        [RollBack("vc", BACK), drained(2)],
    ),
    "the last one fails, and others came up": (
        cluster(up(0, generation=2), failing(1, generation=2), target=2, generation=2, good=1),
        [],
    ),
    "what is good itself is not taken back": (
        cluster(up(0, generation=2), failing(1), target=2, generation=1, good=1, stalled=1),
        [],
    ),
}


@pytest.mark.parametrize("case", TABLE, ids=list(TABLE))
def test_the_table(case: str) -> None:
    there, expected, *places = TABLE[case]
    (nodes,) = places or [ONE]
    assert plan([there], {n.name: n for n in nodes}, NOW) == expected


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
