"""VMs that only fail: backoff and moves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select

from repository.clusters.tables import BackoffRow
from repository.service import Repository
from tests.kit.cluster_nodes import OPERATOR, POOLS, World, declared, fail, node_of, seen
from tests.kit.repository_jobs import push_library, refused
from vmjobs.cluster.failure_backoff import BackoffState
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Goal, Phase
from vmjobs.errors import Conflict, NotFound

pytestmark = [
    pytest.mark.in_process,
    pytest.mark.settings(pools=POOLS, node_lease_seconds=100000),
]


def kept(repository: Repository) -> dict[str, tuple[int, bool]]:
    """Return failures in a row by node (empty: all), and whether its backoff is closed."""
    with repository.database.read() as session:
        rows = session.scalars(select(BackoffRow)).all()
        return {row.node: (row.failures, row.until is not None) for row in rows}


def test_a_vm_that_only_fails_is_moved(world: World, other: Repository) -> None:
    world.apply()
    world.step()
    first = world.vms()["vc-0"]
    elsewhere = {"n1": "n2", "n2": "n1"}[first.node]
    fail(world, "vc-0", 2)
    world.step()
    assert list(world.states()) == ["vc-0"]
    assert seen(world).guards == ()
    fail(world, "vc-0", 1)
    world.step()
    assert world.vms()["vc-0"].goal is Goal.DRAIN
    assert world.vms()["vc-1"].node == elsewhere
    (guard,) = seen(world).guards
    assert (guard.node, guard.state) == (first.node, BackoffState.CLOSED)
    assert guard.code is ClusterVmCode.BOOT_FAILED
    assert guard.message.startswith(f"{first.node}: 3 VMs of {guard.image[:19]}… failed there")
    assert other.clusters.get("vc").guards == (guard,)
    assert ("", "GUARD_CLOSED", "GUARDED") in world.codes()
    world.obey(first.node)
    world.bring_up()
    assert world.states() == {"vc-1": ClusterVmState.UP}
    assert [e[1] for e in world.codes()].count("GUARD_CLOSED") == 1


def test_what_is_said_again_counts_once(world: World) -> None:
    world.apply()
    world.step()
    vm = world.vms()["vc-0"]
    for _ in range(5):
        world.report(vm, Phase.WAITING, failures=1, code=ClusterVmCode.BOOT_FAILED)
        world.report(vm, Phase.WAITING, failures=1, code=ClusterVmCode.BOOT_FAILED, message="x")
    assert kept(world.repository) == {"": (1, False), vm.node: (1, False)}
    world.report(vm, Phase.WAITING, 4, failures=4, code=ClusterVmCode.NODE_FAILED)
    assert kept(world.repository) == {"": (1, False), vm.node: (4, True)}
    world.report(vm, Phase.WAITING, 5, failures=5, code=ClusterVmCode.TOKEN_REFUSED)
    assert kept(world.repository) == {"": (1, False), vm.node: (4, True)}


def test_one_that_ended_after_jobs_came_is_no_failure(world: World) -> None:
    world.apply()
    world.bring_up()
    world.report(world.vms()["vc-0"], Phase.WAITING, code=ClusterVmCode.GUEST_LOST)
    assert kept(world.repository) == {"": (0, False)}


def test_a_guarded_node_is_told_of_and_tried_again(world: World, repository: Repository) -> None:
    repository.nodes.put(node_of("n2", cluster_memory=0))
    world.apply()
    world.step()
    fail(world, "vc-0")
    world.step()
    world.repository.cluster_actions.scale("vc", 2, "root")
    world.step()
    assert world.vms()["vc-0"].goal is Goal.RUN  # there is no other node
    pending = world.vms()["vc-1"]
    assert (pending.state, pending.code) == (ClusterVmState.PENDING, ClusterVmCode.GUARDED)
    assert "failed there in a row, last: BOOT_FAILED no kernel; next try at " in pending.message
    outlook = world.repository.cluster_specs.assess(OPERATOR, declared("other"))
    assert (outlook.pending, outlook.why.partition(":")[0]) == (1, "n1")
    world.step(61)
    assert world.vms()["vc-1"].state is ClusterVmState.PENDING  # vc-0 is tried first
    assert "now one is tried at a time" in world.vms()["vc-1"].message
    world.run("vc-0", 4)
    world.step()
    world.step()
    assert world.states() == {"vc-0": ClusterVmState.UP, "vc-1": ClusterVmState.ASSIGNED}
    assert seen(world).guards == ()
    guarded = [e[1] for e in world.codes() if e[2] == "GUARDED" and not e[0]]
    assert guarded == ["GUARD_CLOSED", "GUARD_OPEN"]


def test_while_it_is_closed_nothing_is_written(
    world: World, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.apply(size=2)
    world.step()
    for name in ("vc-0", "vc-1"):
        fail(world, name)
    world.repository.cluster_actions.scale("vc", 3, "root")
    world.step()
    world.step()
    writes = []
    real = repository.database.write
    monkeypatch.setattr(repository.database, "write", lambda: writes.append(1) or real())
    for _ in range(5):
        world.step(1)
    assert writes == []
    world.step(55)  # its message changes once
    world.step(1)
    assert writes == [1]


def test_a_retry_forgets_failures(world: World) -> None:
    world.apply(size=2)
    world.step()
    for name in ("vc-0", "vc-1"):
        fail(world, name)
    world.step()
    assert {g.node for g in seen(world).guards} == {"", "n1", "n2"}
    revision = world.repository.assignments.get("n1").revision
    done = world.repository.cluster_actions.retry("vc", "root")
    assert done.guards == ()
    assert {m.goal for m in done.members} == {Goal.DRAIN}
    assert world.repository.assignments.get("n1").revision > revision
    world.obey("n1", "n2")
    world.bring_up()
    assert set(world.states().values()) == {ClusterVmState.UP}
    events = [e[1] for e in world.codes() if not e[0]]
    assert events[1:] == ["GUARD_CLOSED"] * 3 + ["RETRIED"] + ["GUARD_OPEN"] * 3


def test_a_retry_lets_running_vms_run(world: World) -> None:
    world.apply(size=2)
    world.bring_up()
    before = world.vms()
    world.repository.cluster_actions.retry("vc", "root")
    world.step()
    after = {name: (vm.id, vm.goal) for name, vm in world.vms().items()}
    assert after == {name: (vm.id, Goal.RUN) for name, vm in before.items()}
    refused(NotFound, lambda: world.repository.cluster_actions.retry("none", "root"))
    world.repository.cluster_actions.delete("vc", Goal.DRAIN, "root")
    refused(Conflict, lambda: world.repository.cluster_actions.retry("vc", "root"))


def test_nothing_is_kept_of_images_that_nobody_has(world: World) -> None:
    world.apply()
    world.bring_up()
    moved = push_library(world.repository, "hep", b"another disk").digest
    world.apply()
    for _ in range(4):
        world.bring_up()
        world.obey("n1", "n2")
    with world.repository.database.read() as session:
        assert {row.image for row in session.scalars(select(BackoffRow))} == {moved}


@pytest.mark.both_databases
def test_failures_of_several_clusters_at_once_are_all_counted(world: World) -> None:
    """They use the same image, so they share its backoff."""
    names = ["a", "b", "c", "d"]
    for name in names:
        world.apply(declared(name, nodes=["n1"]))
    world.step()
    with ThreadPoolExecutor(4) as pool:
        done = pool.map(lambda name: fail(world, f"{name}-0", 3, vc=name), names)
        assert list(done) == [None] * 4
    assert kept(world.repository) == {"": (12, True), "n1": (12, True)}
