"""Declarations that fail: clusters return to the one before."""

from __future__ import annotations

import pytest

from repository.clusters import reconciler
from repository.service import Repository
from tests.kit.cluster_nodes import OPERATOR, POOLS, World, fail, seen
from tests.kit.repository_jobs import clusters_of, push_library
from vmjobs.cluster.vm_state import ClusterVmState, Goal
from vmjobs.cluster.wire import ApplyOutcome
from vmjobs.errors import ImageInUse

pytestmark = [
    pytest.mark.in_process,
    pytest.mark.settings(pools=POOLS, node_lease_seconds=100000),
]


def upgraded(world: World, size: int = 2) -> str:
    """Bring a cluster up, declare more memory; return the first VM that has it."""
    world.apply(size=size)
    world.bring_up()
    world.step()
    world.apply(size=size, memory=300)
    world.step()
    world.obey("n1", "n2")
    (new,) = [m.name for m in world.vms().values() if m.generation == 2]
    return new


def settle(world: World, rounds: int = 6) -> None:
    """Have nodes follow their orders. No VM is ever stopped before its jobs end."""
    for _ in range(rounds):
        world.bring_up()
        for vm in world.vms().values():
            assert vm.goal in {Goal.RUN, Goal.DRAIN}
        world.obey("n1", "n2")


@pytest.mark.both_databases
def test_a_failed_upgrade_is_taken_back(world: World, other: Repository) -> None:
    new = upgraded(world)
    fail(world, new, 2)
    world.step()
    assert seen(world).failed is None
    fail(world, new)
    world.step()
    found = seen(world)
    assert (found.generation, found.spec.memory, found.target) == (1, 256, 2)
    assert found.failed is not None
    assert (found.failed.generation, found.failed.spec.memory) == (2, 300)
    assert found.failed.message == (
        f"generation 2 failed ({new} failed 3 times: BOOT_FAILED: no kernel): back to generation 1"
    )
    assert other.clusters.get("vc") == found
    assert clusters_of(other)[0].failed == found.failed
    assert world.vms()[new].goal is Goal.DRAIN
    told = [e for e in world.repository.clusters.events("vc") if e.state == "ROLLED_BACK"]
    assert [(e.code, e.message) for e in told] == [("REPLACEMENT_FAILED", found.failed.message)]
    settle(world)
    assert set(world.states().values()) == {ClusterVmState.UP}
    assert [m.generation for m in world.vms().values()] == [1, 1]
    assert {o.memory for n in ("n1", "n2") for o in world.orders(n).values()} == {256}
    applied = world.apply(size=2, memory=300)
    assert (applied.outcome, applied.cluster.failed) == (ApplyOutcome.UNCHANGED, found.failed)
    assert [e[1] for e in world.codes()].count("ROLLED_BACK") == 1


@pytest.mark.parametrize("done", ["roll_back", "bump_revision"])
def test_a_worker_that_is_killed_while_it_goes_back(world: World, done: str) -> None:
    fail(world, upgraded(world))
    before, told = seen(world), world.codes()
    world.step_killed_after(reconciler, done)
    assert (seen(world), world.codes()) == (before, told)
    world.step()
    assert seen(world).generation == 1
    assert world.codes().count(("", "ROLLED_BACK", "REPLACEMENT_FAILED")) == 1
    settle(world)
    assert [m.generation for m in world.vms().values()] == [1, 1]


def taken_back(world: World, size: int = 2) -> None:
    """Let a cluster's upgrade fail, and roll the cluster back."""
    fail(world, upgraded(world, size))
    world.step()
    settle(world)


def test_a_retry_declares_it_again(world: World) -> None:
    taken_back(world)
    done = world.repository.cluster_actions.retry("vc", "root")
    assert (done.generation, done.spec.memory, done.failed) == (3, 300, None)
    assert "generation 2 is declared again" in world.repository.clusters.events("vc")[-1].message
    settle(world, 10)
    assert {m.generation for m in world.vms().values()} == {3}
    assert {o.memory for n in ("n1", "n2") for o in world.orders(n).values()} == {300}
    assert set(world.states().values()) == {ClusterVmState.UP}
    # From then on, rollbacks return to that generation.
    world.apply(size=2, memory=310)
    world.step()
    world.obey("n1", "n2")
    (new,) = [m.name for m in world.vms().values() if m.generation == 4]
    fail(world, new)
    world.step()
    assert (seen(world).generation, seen(world).spec.memory) == (3, 300)


def test_generations_are_never_counted_twice(world: World) -> None:
    for memory, generation in ((300, 2), (310, 3), (320, 4)):
        if generation == 2:
            new = upgraded(world)
        else:
            settle(world)
            assert world.apply(size=2, memory=memory).cluster.generation == generation
            world.step()
            world.obey("n1", "n2")
            (new,) = [m.name for m in world.vms().values() if m.generation == generation]
        fail(world, new)
        world.step()
        found = seen(world)
        assert found.failed is not None
        assert (found.generation, found.failed.generation) == (1, generation)


def test_the_number_of_vms_is_not_taken_back(world: World) -> None:
    taken_back(world)
    scaled = world.repository.cluster_actions.scale("vc", 3, "root")
    assert (scaled.target, scaled.spec.size, scaled.spec.memory) == (3, 3, 256)
    assert scaled.failed is not None
    assert (scaled.failed.spec.size, scaled.generation) == (3, 3)
    assert world.apply(size=3, memory=300).outcome is ApplyOutcome.UNCHANGED
    settle(world)
    assert [m.generation for m in world.vms().values()] == [3, 3, 3]
    assert len({m.id for m in world.vms().values()}) == 3
    done = world.repository.cluster_actions.retry("vc", "root")
    assert (done.target, done.spec.memory, done.generation) == (3, 300, 4)


def test_the_earlier_declaration_again_ends_it(world: World) -> None:
    taken_back(world)
    before = {m.id for m in world.vms().values()}
    applied = world.apply(size=2)
    assert (applied.outcome, applied.cluster.failed) == (ApplyOutcome.CHANGED, None)
    assert applied.cluster.generation == 3
    settle(world)
    assert {m.id for m in world.vms().values()} == before
    assert world.apply(size=2).outcome is ApplyOutcome.UNCHANGED


def test_images_to_go_back_to_and_to_try_again_stay(world: World) -> None:
    repository = world.repository
    old = push_library(repository, "first", b"a first disk").digest
    new = push_library(repository, "next", b"another disk").digest
    world.apply(image="first")
    world.bring_up()
    world.step()
    world.apply(image="next")
    world.step()
    world.obey("n1", "n2")
    assert {m.image for m in world.vms().values()} == {new}
    with pytest.raises(ImageInUse, match="vc"):
        repository.catalog.remove(OPERATOR, old)
    fail(world, "vc-1")  # on one node, and its successor on the other
    world.step()
    world.obey("n1", "n2")
    assert (seen(world).image, list(world.states())) == (new, ["vc-0"])
    fail(world, "vc-0")
    world.step()
    settle(world)
    assert {m.image for m in world.vms().values()} == {seen(world).image} == {old}
    with pytest.raises(ImageInUse, match="vc"):
        repository.catalog.remove(OPERATOR, new)
    world.apply(image="first")
    repository.catalog.remove(OPERATOR, new)
