"""Virtual clusters in the repository: declaring, placing, admitting and ending their VMs."""

from __future__ import annotations

from functools import partial

import pytest

from repository.clusters import history, queries
from repository.clusters.core import node_lease
from repository.clusters.reconciler import ClusterReconciler
from repository.clusters.tables import ClusterEventRow
from repository.db.models import NodeRow
from repository.images import Viewer
from repository.images.tables import HoldingRow
from repository.service import Repository, open_repository
from tests.kit.cluster_nodes import OPERATOR, POOLS, World, declared, node_of
from tests.kit.repository_jobs import clusters_of, push, push_library, refused
from vmjobs.cluster.pool import ProbeState
from vmjobs.cluster.spec import SizeRange
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Goal, Phase
from vmjobs.cluster.wire import ApplyOutcome, ClusterVmReport, ClusterVmReports
from vmjobs.config import Config
from vmjobs.errors import (
    Conflict,
    Forbidden,
    ImageInUse,
    InvalidRequest,
    InvalidSpec,
    NotFound,
    Unavailable,
)
from vmjobs.model import now

pytestmark = [
    pytest.mark.in_process,
    pytest.mark.settings(pools=POOLS, node_lease_seconds=300),
]


# ------------------------------------------------------------------------- declaring


@pytest.mark.both_databases
def test_declaring_the_same_again_changes_nothing(world: World) -> None:
    first = world.apply(size=2)
    assert (first.outcome, first.cluster.generation, first.cluster.target) == (
        ApplyOutcome.CREATED,
        1,
        2,
    )
    assert first.cluster.image == world.repository.catalog.resolve(OPERATOR, "hep")
    again = world.apply(size=2)
    assert again.outcome is ApplyOutcome.UNCHANGED
    assert again.cluster == first.cluster == world.repository.clusters.get("vc")
    changed = world.apply(size=2, memory=300)
    assert (changed.outcome, changed.cluster.generation) == (ApplyOutcome.CHANGED, 2)
    assert [c.name for c in clusters_of(world.repository)] == ["vc"]
    assert world.codes() == [("", "CREATED", "PROGRESS"), ("", "CHANGED", "PROGRESS")]


def test_a_tag_that_means_another_image_is_a_change(world: World) -> None:
    world.apply()
    moved = push_library(world.repository, "hep", b"another disk")
    applied = world.apply()
    assert (applied.outcome, applied.cluster.image) == (ApplyOutcome.CHANGED, moved.digest)


def test_every_fault_is_told(world: World) -> None:
    with pytest.raises(InvalidSpec) as caught:
        world.apply(image="nothing", pool="nowhere")
    assert {fault.code for fault in caught.value.faults} == {"unknown_image", "unknown_pool"}
    assert "known are site, other" in caught.value.faults[0].message
    assert clusters_of(world.repository) == []


def test_without_a_pool_there_are_no_clusters(config: Config) -> None:
    repository = open_repository(config.model_copy(update={"pools": {}}), migrate=False)
    push_library(repository)
    with pytest.raises(InvalidSpec) as caught:
        World(repository).apply()
    repository.close()
    (fault,) = caught.value.faults
    assert (fault.field, fault.code) == ("pool", "no_pool")


def test_a_pool_that_is_taken_out_of_the_settings_is_told_once(world: World, config: Config) -> None:
    world.apply(size=3)
    less = open_repository(config.model_copy(update={"pools": {}}), migrate=False)
    for _ in range(3):
        less.reconciler.reconcile({})
    less.close()
    told = [event for event in world.repository.clusters.events("vc") if event.code == "NO_POOL"]
    assert [event.message for event in told] == [
        "no VMs are created: there is no pool: see the service's setting pools"
    ]


def test_what_is_not_there(world: World) -> None:
    refused(
        NotFound,
        lambda: world.repository.clusters.get("vc"),
        lambda: world.repository.clusters.events("vc"),
        lambda: world.repository.cluster_actions.scale("vc", 1, "root"),
        lambda: world.repository.cluster_actions.drain("vc", "root"),
        lambda: world.repository.cluster_actions.resume("vc", "root"),
        lambda: world.repository.cluster_actions.delete("vc", Goal.DRAIN, "root"),
        lambda: world.repository.clusters.open_console("vc", "vc-0"),
    )


def test_an_assessment_changes_nothing(world: World) -> None:
    found = world.repository.cluster_specs.assess(OPERATOR, declared(size=9))
    assert (found.placed, found.pending) == ({"n1": 4, "n2": 4}, 1)
    assert "n1 lacks" in found.why
    world.apply(size=3)
    world.step()
    other = world.repository.cluster_specs.assess(OPERATOR, declared("other", size=6))
    assert (other.placed, other.pending) == ({"n1": 2, "n2": 3}, 1)
    # It replaces the present cluster.
    assert world.repository.cluster_specs.assess(OPERATOR, declared(size=8)).pending == 0
    assert [c.name for c in clusters_of(world.repository)] == ["vc"]
    refused(
        InvalidSpec, lambda: world.repository.cluster_specs.assess(OPERATOR, declared(image="nothing"))
    )


# ------------------------------------------------------------------------- placing, admitting


@pytest.mark.both_databases
def test_from_a_declaration_to_vms_that_take_jobs(world: World) -> None:
    world.apply(size=2, attributes={"Color": "red"}, start="TARGET.x == 1")
    world.step()
    assert set(world.states().values()) == {ClusterVmState.ASSIGNED}
    order = world.orders("n1")["vc-0"]
    assert (order.pool.collector, order.pool.trust_domain) == ("site.grid", "grid")
    assert (order.attributes, order.start, order.admitted) == ({"Color": "red"}, "TARGET.x == 1", 0)
    revision = world.repository.assignments.get("n1").revision

    vm = world.vms()["vc-0"]
    for phase, state in (
        (Phase.STAGING, ClusterVmState.STAGING),
        (Phase.BOOTING, ClusterVmState.BOOTING),
        (Phase.RUNNING, ClusterVmState.JOINING),
    ):
        world.report(vm, phase)
        assert world.states()["vc-0"] is state
    world.step()
    assert world.pool.probed == []
    world.pool.join("vc-0")
    world.pool.probing = ProbeState.WAITING
    world.step()
    assert world.states()["vc-0"] is ClusterVmState.PROBING
    world.pool.probing = ProbeState.RAN
    world.step()
    found = world.vms()["vc-0"]
    assert (found.state, found.up_since is not None) == (ClusterVmState.UP, True)
    assert world.orders("n1")["vc-0"].admitted == 1
    assert world.repository.assignments.get("n1").revision > revision
    assert world.repository.clusters.get("vc").up == clusters_of(world.repository)[0].up == 1
    passed = [state for name, state, _ in world.codes() if name == "vc-0"]
    assert passed == ["ASSIGNED", "STAGING", "BOOTING", "JOINING", "PROBING", "UP"]


def test_a_step_with_nothing_to_do_writes_nothing(world: World, other: Repository) -> None:
    world.apply(size=2)
    world.bring_up()
    assert set(world.states().values()) == {ClusterVmState.UP}
    before = (
        world.repository.assignments.get("n1"),
        world.repository.clusters.get("vc"),
        world.codes(),
    )
    calls = world.pool.calls
    for _ in range(5):
        world.step()
    assert world.pool.calls == calls  # no VM waits for the pool
    other.reconciler.reconcile({"site": world.pool})
    assert before == (
        world.repository.assignments.get("n1"),
        world.repository.clusters.get("vc"),
        world.codes(),
    )
    world.step(20)
    assert world.pool.calls == calls + 1


def test_why_there_is_no_room(world: World) -> None:
    world.apply(size=9)
    world.step()
    pending = [m for m in world.vms().values() if m.state is ClusterVmState.PENDING]
    (vm,) = pending
    assert (vm.code, vm.node) == (ClusterVmCode.NO_ROOM, "")
    assert "n1 lacks" in vm.message
    for name in ("n1", "n2"):
        world.repository.nodes.put(node_of(name, cluster_memory=0))
    world.step()
    assert "cluster_memory is 0 on n1, n2" in world.vms()[vm.name].message
    world.repository.nodes.put(node_of("n3"))
    world.step()
    assert world.vms()[vm.name].node == "n3"


def test_one_that_does_not_join_is_condemned_and_tried_again(world: World) -> None:
    world.apply()
    world.step()
    world.report(world.vms()["vc-0"], Phase.RUNNING)
    world.step(30)
    assert world.orders("n1")["vc-0"].condemned == 0
    world.step(31)
    order = world.orders("n1")["vc-0"]
    assert (order.condemned, order.why) == (1, ClusterVmCode.JOIN_TIMED_OUT)
    world.report(
        world.vms()["vc-0"],
        Phase.WAITING,
        failures=1,
        code=ClusterVmCode.JOIN_TIMED_OUT,
        retry=now(),
    )
    found = world.vms()["vc-0"]
    assert (found.state, found.failures) == (ClusterVmState.BACKOFF, 1)
    assert found.code is ClusterVmCode.JOIN_TIMED_OUT
    world.run("vc-0", 2)
    world.step()
    assert world.states()["vc-0"] is ClusterVmState.UP
    assert world.orders("n1")["vc-0"].admitted == 2


def test_a_failed_probe_condemns(world: World) -> None:
    world.apply()
    world.step()
    world.pool.probing = ProbeState.FAILED
    world.run("vc-0")
    world.step()
    assert world.orders("n1")["vc-0"].why is ClusterVmCode.PROBE_FAILED
    assert ("vc-0", "PROBING", "PROBE_FAILED") in world.codes()


def test_a_pool_that_does_not_answer_is_nobodys_fault(world: World) -> None:
    world.apply()
    world.step()
    world.report(world.vms()["vc-0"], Phase.RUNNING)
    world.pool.down = True
    for _ in range(5):
        world.step(40)
    assert world.orders("n1")["vc-0"].condemned == 0
    assert world.codes()[-1] == ("", "POOL", "POOL_UNAVAILABLE")
    world.pool.down = False
    world.step(15)
    assert world.orders("n1")["vc-0"].condemned == 0
    world.pool.join("vc-0")
    world.step()
    assert world.states()["vc-0"] is ClusterVmState.UP
    assert ("", "POOL", "PROGRESS") in world.codes()


def test_a_pool_whose_schedd_alone_is_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector's ads are known; no VM is admitted, none condemned."""
    world.apply()
    world.step()

    def probes(machines: object) -> None:
        raise Unavailable("pool", "the schedd does not answer")

    monkeypatch.setattr(world.pool, "probes", probes)
    world.run("vc-0")
    for _ in range(4):
        world.step(20)
    assert world.states() == {"vc-0": ClusterVmState.PROBING}
    assert world.orders("n1")["vc-0"].condemned == 0
    asked = world.pool.calls
    for _ in range(5):
        world.step(1)  # a silent schedd is asked less often
    assert world.pool.calls == asked
    monkeypatch.undo()
    world.step(15)
    assert world.states() == {"vc-0": ClusterVmState.UP}


def test_a_vm_that_ends_is_withdrawn_at_once(world: World) -> None:
    world.apply()
    world.bring_up()
    calls = world.pool.calls
    world.report(world.vms()["vc-0"], Phase.WAITING, code=ClusterVmCode.GUEST_LOST, failures=0)
    assert world.states()["vc-0"] is ClusterVmState.BACKOFF
    world.pool.down = True
    world.step()
    assert world.pool.withdrawn == []
    world.pool.down = False
    world.step()
    assert (world.pool.withdrawn, world.pool.calls) == ([("vc-0", 1)], calls)
    world.step()
    assert world.pool.withdrawn == [("vc-0", 1)]  # once is enough
    world.report(world.vms()["vc-0"], Phase.RUNNING, 2)
    world.pool.join("vc-0", 2)
    world.step()
    assert world.pool.withdrawn == [("vc-0", 1)]
    assert world.states() == {"vc-0": ClusterVmState.UP}


def test_what_the_pool_says_of_jobs(world: World) -> None:
    world.apply()
    world.bring_up()
    assert world.vms()["vc-0"].system == ""
    world.pool.join("vc-0", busy=True, jobs=7, system="Debian GNU/Linux 13 (trixie)")
    world.step(20)
    found = world.vms()["vc-0"]
    assert (found.busy, found.jobs) == (True, 7)
    assert found.system == "Debian GNU/Linux 13 (trixie)"
    world.pool.there.clear()
    world.step(20)
    assert world.vms()["vc-0"].system == "Debian GNU/Linux 13 (trixie)"  # from its last ad


# ------------------------------------------------------------------------- changing size


def test_scaling(world: World) -> None:
    world.apply(size=1)
    world.bring_up()
    assert world.repository.cluster_actions.scale("vc", 3, "root").target == 3
    world.bring_up()
    assert len(world.vms()) == 3
    cluster = world.repository.clusters.get("vc")
    assert (cluster.spec.size, cluster.generation) == (3, 2)
    assert {m.generation for m in cluster.members} == {2}
    world.repository.cluster_actions.scale("vc", 1, "root")
    world.step()
    assert list(world.states().values()) == [ClusterVmState.UP, *[ClusterVmState.DRAINING] * 2]
    world.obey("n1", "n2")
    assert list(world.vms()) == ["vc-0"]
    # An incarnation that its agent has not reported may have had a token.
    told = [(name, incarnation) for name in ("vc-1", "vc-2") for incarnation in (1, 2)]
    assert sorted(world.pool.withdrawn) == told
    assert "vc-1" not in world.orders("n2")
    # The file still says 1.
    assert world.apply(size=1).outcome is ApplyOutcome.UNCHANGED


def test_an_attribute_of_another_type_is_a_change(world: World) -> None:
    world.apply(attributes={"HasCVMFS": 1})
    assert world.apply(attributes={"HasCVMFS": True}).outcome is ApplyOutcome.CHANGED
    assert world.apply(attributes={"HasCVMFS": True}).outcome is ApplyOutcome.UNCHANGED
    assert world.apply(attributes={"HasCVMFS": 1.0}).outcome is ApplyOutcome.CHANGED


def test_scaling_within_a_range(world: World) -> None:
    assert world.apply(size=SizeRange(min=1, max=3)).cluster.target == 1
    assert world.repository.cluster_actions.scale("vc", 3, "root").target == 3
    with pytest.raises(InvalidRequest) as caught:
        world.repository.cluster_actions.scale("vc", 4, "root")
    assert caught.value.faults[0].code == "out_of_range"
    assert world.apply(size=SizeRange(min=1, max=3)).outcome is ApplyOutcome.UNCHANGED
    assert world.repository.clusters.get("vc").target == 3
    assert world.apply(size=SizeRange(min=1, max=2)).cluster.target == 2


def test_an_order_counts_until_it_is_gone(world: World) -> None:
    world.apply(size=8)
    world.bring_up()
    world.repository.cluster_actions.scale("vc", 0, "root")
    world.apply(declared("other"))
    world.step()
    world.step()
    assert world.states("other") == {"other-0": ClusterVmState.PENDING}
    world.obey("n1", "n2")
    world.step()
    assert world.states("other") == {"other-0": ClusterVmState.ASSIGNED}


# ------------------------------------------------------------------------- changed declarations


def test_vms_are_replaced_one_at_a_time(world: World) -> None:
    world.apply(size=2)
    world.bring_up()
    world.apply(size=2, memory=300)
    seen = []
    for _ in range(12):
        world.bring_up()
        states = list(world.states().values())
        assert states.count(ClusterVmState.UP) >= 1
        assert states.count(ClusterVmState.DRAINING) <= 1
        seen.append(tuple(world.states()))
        world.obey("n1", "n2")
    assert {m.generation for m in world.vms().values()} == {2}
    assert set(world.states().values()) == {ClusterVmState.UP}
    assert {o.memory for n in ("n1", "n2") for o in world.orders(n).values()} == {300}
    assert len(set(seen)) > 2


@pytest.mark.both_databases
def test_a_failing_replacement_ends_it(world: World) -> None:
    world.apply(size=2)
    world.bring_up()
    world.apply(size=2, memory=300)
    world.step()
    world.step()
    (new,) = [m for m in world.vms().values() if m.generation == 2]
    world.obey("n1", "n2")
    world.report(new, Phase.WAITING, 3, failures=3, code=ClusterVmCode.BOOT_FAILED, message="no kernel")
    for _ in range(3):
        world.step()
    stalls = [e for e in world.repository.clusters.events("vc") if e.state == "STALLED"]
    assert [e.code for e in stalls] == ["REPLACEMENT_FAILED"]
    assert "BOOT_FAILED: no kernel" in stalls[0].message
    assert sorted(m.generation for m in world.vms().values()) == [1, 2]
    assert ClusterVmState.DRAINING not in world.states().values()
    world.apply(size=2)  # the earlier declaration again, as generation 3
    for _ in range(8):
        world.bring_up()
        world.obey("n1", "n2")
    assert {m.generation for m in world.vms().values()} == {3}
    assert set(world.states().values()) == {ClusterVmState.UP}


# ------------------------------------------------------------------------- lost nodes


def test_a_lost_node_and_its_return(world: World) -> None:
    world.apply(nodes=["n1", "n2"])
    world.bring_up()
    (lost,) = world.vms().values()
    other = {"n1": "n2", "n2": "n1"}[lost.node]
    world.later += node_lease(world.repository.config) * 1.1

    def hear(node: str) -> None:
        with world.repository.database.write() as session:
            row = session.get(NodeRow, node)
            assert row is not None
            row.heard = now() + world.later

    hear(other)
    world.step()
    assert (
        world.codes()[-1][:2] == ("vc-1", "ASSIGNED") or ("vc-0", "LOST", "NODE_LOST") in world.codes()
    )
    assert world.vms()["vc-1"].node == other
    world.step()
    assert ("vc-0", "LOST", "NODE_LOST") in world.codes()
    world.run("vc-1")
    world.step()
    hear(lost.node)
    world.step()
    goals = {m.name: m.goal for m in world.vms().values()}
    assert goals == {"vc-0": Goal.RUN, "vc-1": Goal.DRAIN}


def test_a_node_that_lost_what_it_knew_gets_other_vms(world: World) -> None:
    world.apply()
    world.step()
    before = world.vms()["vc-0"]
    nothing = ClusterVmReports(reports=(), complete=True)
    world.repository.assignments.store_reports(before.node, nothing)  # the agent does not know it yet
    assert world.states() == {"vc-0": ClusterVmState.ASSIGNED}
    world.run("vc-0", 5)
    world.step()
    world.repository.assignments.store_reports(before.node, nothing)
    assert world.vms()["vc-0"].code is ClusterVmCode.NODE_FAILED
    world.step()
    assert list(world.vms()) == ["vc-1"]
    assert world.pool.withdrawn == [("vc-0", incarnation) for incarnation in range(1, 7)]


@pytest.mark.both_databases
def test_reports_that_were_overtaken_are_passed_over(world: World) -> None:
    world.apply()
    world.step()
    world.run("vc-0", 3)
    world.report(world.vms()["vc-0"], Phase.BOOTING, 2)
    assert world.vms()["vc-0"].incarnation == 3
    stranger = ClusterVmReport(id="0" * 32, incarnation=1, phase=Phase.RUNNING, since=now())
    world.repository.assignments.store_reports("n1", ClusterVmReports(reports=(stranger,)))
    # Reports of another node are ignored.
    mine = world.vms()["vc-0"]
    told = ClusterVmReport(id=mine.id, incarnation=9, phase=Phase.GONE, since=now())
    world.repository.assignments.store_reports(
        "n2" if mine.node == "n1" else "n1", ClusterVmReports(reports=(told,))
    )
    assert world.vms()["vc-0"].incarnation == 3


# ------------------------------------------------------------------------- draining and deleting


def test_draining_and_resuming(world: World) -> None:
    world.apply(size=2)
    world.bring_up()
    assert world.repository.cluster_actions.drain("vc", "root").draining
    world.step()
    world.obey("n1", "n2")
    assert world.vms() == {}
    world.step()
    assert world.vms() == {}
    assert not world.repository.cluster_actions.resume("vc", "root").draining
    world.bring_up()
    assert len(world.vms()) == 2


@pytest.mark.both_databases
def test_deleting_lets_jobs_end(world: World) -> None:
    world.apply(size=2)
    world.bring_up()
    assert world.repository.cluster_actions.delete("vc", Goal.DRAIN, "root").deleting
    world.step()
    assert {o.goal for o in world.orders("n1").values()} == {Goal.DRAIN}
    refused(
        Conflict,
        lambda: world.apply(size=3),
        lambda: world.repository.cluster_actions.scale("vc", 3, "root"),
        lambda: world.repository.cluster_actions.resume("vc", "root"),
    )
    world.repository.cluster_actions.delete("vc", Goal.STOP, "root")
    world.repository.cluster_actions.delete("vc", Goal.DRAIN, "root")  # the goal stays STOP
    world.step()
    assert {o.goal for o in world.orders("n1").values()} == {Goal.STOP}
    world.obey("n1", "n2")
    world.step()
    refused(NotFound, lambda: world.repository.clusters.get("vc"))
    assert world.orders("n1") == {}
    assert world.apply(size=1).outcome is ApplyOutcome.CREATED


def test_a_vm_is_kept_until_its_pool_has_forgotten_it(world: World) -> None:
    world.apply()
    world.bring_up()
    world.repository.cluster_actions.delete("vc", Goal.STOP, "root")
    world.step()
    world.pool.down = True
    world.obey("n1", "n2")
    world.step()
    assert world.states() == {"vc-0": ClusterVmState.GONE}
    world.pool.down = False
    world.step()
    world.step()
    assert clusters_of(world.repository) == []


@pytest.mark.parametrize("asked", ["vms", "probes", "withdraw"])
def test_a_worker_that_is_killed_when_it_has_asked_a_pool(world: World, asked: str) -> None:
    world.apply(size=2)
    world.step()
    for name in world.vms():
        world.run(name)
    if asked == "withdraw":
        world.step()
        world.repository.cluster_actions.delete("vc", Goal.STOP, "root")
        world.step()
        for vm in world.vms().values():
            world.report(vm, Phase.GONE)
    before = world.repository.clusters.get("vc")
    world.step_killed_after(world.pool, asked)
    assert world.repository.clusters.get("vc") == before
    world.step()
    world.step()
    if asked == "withdraw":
        assert clusters_of(world.repository) == []
        assert world.pool.there == {}
    else:
        assert set(world.states().values()) == {ClusterVmState.UP}


# ------------------------------------------------------------------------- agents


def test_who_may_have_a_token(world: World) -> None:
    world.apply()
    world.step()
    vm = world.vms()["vc-0"]
    other = "n2" if vm.node == "n1" else "n1"
    assert world.repository.assignments.order_for(vm.node, vm.id, 1).name == "vc-0"
    ask, node, mine = world.repository.assignments.order_for, vm.node, vm.id
    for asked in ((other, mine, 1), (node, "0" * 32, 1), (node, "no id", 1), (node, mine, 2)):
        refused(Forbidden, lambda asked=asked: ask(*asked))
    world.report(vm, Phase.RUNNING, 3)
    for incarnation in (3, 4):
        ask(node, mine, incarnation)
    refused(Forbidden, lambda: ask(node, mine, 2), lambda: ask(node, mine, 5))
    world.step(61)
    refused(Forbidden, lambda: ask(node, mine, 3), match="has to end")
    world.repository.cluster_actions.delete("vc", Goal.STOP, "root")
    world.step()
    refused(Forbidden, lambda: ask(node, mine, 4), match="has to stop")


def test_consoles_of_this_vm_and_the_one_before(world: World) -> None:
    world.apply()
    world.step()
    vm = world.vms()["vc-0"]
    node = vm.node

    def console(incarnation: int = 0) -> bytes:
        reader = world.repository.clusters.open_console("vc", "vc-0", incarnation)
        return b"".join(reader.chunks())

    assert console() == b""
    for incarnation in (1, 2, 3):
        text = f"machine {incarnation}".encode()
        world.repository.assignments.append_console(node, vm.id, incarnation, 0, text[:4])
        world.repository.assignments.append_console(node, vm.id, incarnation, 0, text)
        world.report(vm, Phase.RUNNING, incarnation)
    assert (console(), console(2)) == (b"machine 3", b"machine 2")
    append = world.repository.assignments.append_console
    refused(NotFound, lambda: console(1), match="is not kept")
    refused(Conflict, lambda: append(node, vm.id, 3, 100, b"later"))
    for host, of, number in (
        (node, vm.id, 1),
        (node, vm.id, 5),
        (node, "0" * 32, 3),
        ("n9", vm.id, 3),
    ):
        refused(Forbidden, partial(append, host, of, number, 0, b"x"))
    folder = world.repository.config.data_dir / "streams" / vm.id[-2:] / vm.id
    assert sorted(int(path.name, 16) for path in folder.iterdir()) == [2, 3]
    world.repository.cluster_actions.delete("vc", Goal.STOP, "root")
    world.step()
    world.report(vm, Phase.GONE, 3)
    world.step()
    assert not folder.exists()


def test_no_console_is_left_of_a_vm_though_the_worker_is_killed_once_it_is_forgotten(
    world: World,
) -> None:
    world.apply()
    world.step()
    vm = world.vms()["vc-0"]
    world.repository.assignments.append_console(vm.node, vm.id, 1, 0, b"machine 1")
    world.repository.cluster_actions.delete("vc", Goal.STOP, "root")
    world.step()
    world.report(vm, Phase.GONE, 1)
    world.step_killed_after(ClusterReconciler, "_write")
    folder = world.repository.config.data_dir / "streams" / vm.id[-2:] / vm.id
    assert not folder.exists()


def test_the_history_keeps_its_last_lines(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (history, queries):
        monkeypatch.setattr(module, "MAX_EVENTS", 20)
    monkeypatch.setattr(history, "_PRUNE_BATCH", 5)
    world.apply()
    for number in range(25):
        world.repository.cluster_actions.scale("vc", number % 2 + 1, "root")
    events = world.repository.clusters.events("vc")
    assert [e.seq for e in events] == list(range(6, 26))
    assert world.repository.clusters.events("vc", events[-3].seq) == events[-2:]
    with world.repository.database.read() as session:
        assert session.query(ClusterEventRow).count() < 26


# ------------------------------------------------------------------------- images


@pytest.mark.both_databases
def test_an_image_that_a_cluster_needs_stays(world: World) -> None:
    repository = world.repository
    ada = Viewer("ada", admin=True)
    digest = push(repository, ada, b"a disk of ada's", b"a kernel", name="mine").digest
    world.repository.cluster_specs.apply(ada, declared(image="mine"))
    with pytest.raises(ImageInUse, match="virtual clusters: vc"):
        repository.catalog.remove(ada, digest)
    world.bring_up()
    moved = world.repository.cluster_specs.apply(ada, declared(image="hep"))
    assert moved.outcome is ApplyOutcome.CHANGED
    with pytest.raises(ImageInUse):
        repository.catalog.remove(ada, digest)  # a VM of it still runs
    # So nodes may read it, though it is private.
    assert repository.catalog.manifest(Viewer("n1", node=True), digest)
    for _ in range(4):
        world.bring_up()
        world.obey("n1", "n2")
    repository.catalog.remove(ada, digest)


@pytest.mark.both_databases
def test_an_expired_image_is_not_collected_while_a_cluster_needs_it(world: World) -> None:
    repository = world.repository
    ada = Viewer("ada", admin=True)
    digest = push(repository, ada, b"a disk of ada's", b"a kernel", name="mine", keep_days=1).digest
    world.repository.cluster_specs.apply(ada, declared(image="mine"))
    with repository.database.write() as session:
        for row in session.query(HoldingRow).where(HoldingRow.image == digest):
            row.expires = now()
    repository.garbage_collector.collect()
    assert repository.catalog.manifest(Viewer("n1", node=True), digest)
    world.repository.cluster_actions.delete("vc", Goal.STOP, "root")
    world.step()
    repository.garbage_collector.collect()
    refused(NotFound, lambda: repository.catalog.manifest(Viewer("n1", node=True), digest))
