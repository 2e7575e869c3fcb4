"""Which cluster VM an ad in a pool belongs to, and how a slow pool affects waiting VMs."""

from __future__ import annotations

from datetime import timedelta

import pytest

from repository.clusters import pools as polling
from repository.service import Repository
from tests.kit.cluster_nodes import POOLS, ROOMY, World
from vmjobs.cluster.pool import PoolVm, ProbeState
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Phase
from vmjobs.errors import Unavailable

pytestmark = [
    pytest.mark.in_process,
    pytest.mark.settings(pools=POOLS, node_lease_seconds=100000),
]

EARLIER = "e" * 32


@pytest.fixture
def world(repository: Repository) -> World:
    return World(repository, "n1", **ROOMY)


class SlowPool:
    """A pool that answers slowly, and the clock that measures it."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slow, self._now = 0.0, 0.0
        vms = world.pool.vms

        def slowly() -> list[PoolVm]:
            self._now += self.slow
            world.later += timedelta(seconds=self.slow)
            return vms()

        monkeypatch.setattr(polling, "monotonic", lambda: self._now)
        monkeypatch.setattr(world.pool, "vms", slowly)


def test_an_earlier_members_machine_admits_nobody(world: World) -> None:
    world.apply()
    world.step()
    world.report(world.vms()["vc-0"], Phase.RUNNING)
    world.pool.join("vc-0", id=EARLIER)
    world.step()
    assert world.states() == {"vc-0": ClusterVmState.JOINING}
    assert world.orders("n1")["vc-0"].admitted == 0
    assert world.pool.probed == []


@pytest.mark.parametrize("refuses", [False, True])
def test_an_earlier_vm_condemns_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """The old VM's ad has a later incarnation than the new VM; only that ad is withdrawn."""

    def refused(_: object) -> None:
        raise Unavailable("pool", "the collector refuses")

    if refuses:
        monkeypatch.setattr(world.pool, "withdraw", refused)
    world.apply()
    world.step()
    world.pool.join("vc-0", 7, id=EARLIER)
    world.run("vc-0")
    world.step()
    (vm,) = world.vms().values()
    assert vm.state is ClusterVmState.UP
    assert world.pool.probed == [{(vm.id, 1)}]
    assert world.pool.withdrawn == ([] if refuses else [("vc-0", 7)])
    assert refuses or world.pool.there.keys() == {("vc-0", vm.id)}


def test_all_are_asked_about_at_once(world: World) -> None:
    world.apply(size=20)
    world.step()
    for name in world.vms():
        world.run(name)
    world.step()
    assert set(world.states().values()) == {ClusterVmState.UP}
    assert world.pool.probed == [{(vm.id, 1) for vm in world.vms().values()}]


def test_time_that_a_slow_pool_takes_is_not_the_vms(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SlowPool(world, monkeypatch)
    world.apply()
    world.step()
    world.pool.probing = ProbeState.WAITING
    world.run("vc-0")
    clock.slow = 50
    for _ in range(3):
        world.step(10)
    assert world.orders("n1")["vc-0"].condemned == 0
    clock.slow = 0
    world.step(20)
    assert world.orders("n1")["vc-0"].condemned == 0
    world.step(20)
    order = world.orders("n1")["vc-0"]
    assert (order.condemned, order.why) == (1, ClusterVmCode.JOIN_TIMED_OUT)
