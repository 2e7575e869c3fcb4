"""VMs of clusters in the repository: placing, admitting and losing them, and what agents send."""

from __future__ import annotations

from functools import partial

import pytest

from repository.clusters.core import node_lease
from repository.clusters.reconciler import ClusterReconciler
from repository.db.models import NodeRow
from repository.service import Repository
from tests.kit.cluster_nodes import POOLS, World
from tests.kit.repository_jobs import clusters_of, refused
from vmjobs.cluster.pool import ProbeState
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Goal, Phase
from vmjobs.cluster.wire import ClusterVmReport, ClusterVmReports
from vmjobs.errors import Conflict, Forbidden, NotFound, Unavailable
from vmjobs.model import now

pytestmark = [
    pytest.mark.in_process,
    pytest.mark.settings(pools=POOLS, node_lease_seconds=300),
]


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


def test_one_that_does_not_join_is_condemned_and_tried_again(world: World) -> None:
    world.apply()
    world.step()
    world.report(world.vms()["vc-0"], Phase.RUNNING)
    world.step(30)
    assert world.orders("n1")["vc-0"].condemned == 0
    world.step(31)
    order = world.orders("n1")["vc-0"]
    assert (order.condemned, order.why) == (1, ClusterVmCode.JOIN_TIMED_OUT)
    world.step()
    assert [code for *_, code in world.codes()].count("JOIN_TIMED_OUT") == 1  # told once
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
