"""Clusters of a range of sizes in the repository: their size follows demand."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from repository.clusters import autoscaling
from repository.service import Repository
from tests.kit.cluster_nodes import POOLS, ROOMY, World
from tests.kit.repository_jobs import clusters_of, refused
from vmjobs.cluster.vm_state import ClusterVmState, Goal
from vmjobs.errors import NotFound
from vmjobs.model import now

pytestmark = [
    pytest.mark.in_process,
    pytest.mark.settings(pools=POOLS, node_lease_seconds=100000),
]


@pytest.fixture
def world(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> World:
    """Nodes with more capacity than any of these clusters needs; time passes as tests say alone."""
    monkeypatch.setattr(autoscaling, "monotonic", lambda: 0.0)
    made, began = World(repository, "n1", "n2", **ROOMY), now()
    made.clock = lambda: began
    return made


def ranged(world: World, least: int, most: int, **more: Any) -> None:
    world.apply(size={"min": least, "max": most}, idle_seconds=60, **more)


def busy(world: World, *names: str) -> None:
    """Have these VMs run jobs, and no others."""
    for key, vm in world.pool.there.items():
        works = vm.name in names
        world.pool.there[key] = replace(vm, busy=works, jobs=vm.jobs + works)


def test_a_probe_that_runs_is_no_job(world: World) -> None:
    ranged(world, 0, 2)
    world.pool.wait(1)
    world.step()
    world.step(11)
    world.bring_up()
    world.pool.join("vc-0", busy=True, jobs=0)
    world.step(20)
    world.step(20)
    assert running(world) == ["vc-0"]


def running(world: World, name: str = "vc") -> list[str]:
    return [m.name for m in world.repository.clusters.get(name).members if m.goal is Goal.RUN]


def told(world: World) -> list[str]:
    return [e.message for e in world.repository.clusters.events("vc") if e.state == "SCALED"]


@pytest.mark.both_databases
def test_a_job_wakes_a_cluster_and_its_end_puts_it_to_sleep(world: World) -> None:
    ranged(world, 0, 2)
    world.step()
    assert (running(world), world.pool.offers) == ([], ["vc"])
    world.pool.wait(1)
    world.step(11)
    assert running(world) == ["vc-0"]
    assert told(world) == ["1 VM: 1 idle job that only this cluster can run"]
    world.bring_up()
    world.pool.wait(0)
    busy(world, "vc-0")
    world.step(100)
    world.step(100)
    assert world.states() == {"vc-0": ClusterVmState.UP}  # as long as its job runs
    busy(world)
    world.step(20)
    world.step(50)
    assert running(world) == ["vc-0"]
    world.step(11)
    assert running(world) == []
    assert told(world)[1:] == ["0 VMs: no more were needed for 60 s"]
    world.obey("n1", "n2")
    assert world.vms() == {}


def test_a_cluster_of_its_greatest_size_shows_no_vm_that_could_be_started(world: World) -> None:
    ranged(world, 0, 1)
    world.pool.wait(1)
    world.step()
    assert (running(world), world.pool.offers) == (["vc-0"], ["vc"])
    world.step(11)
    assert world.pool.offers == []


def test_a_pool_that_does_not_answer_changes_nothing(world: World) -> None:
    ranged(world, 0, 2)
    world.pool.wait(1)
    world.step()
    world.pool.wait(0)
    world.step(20)
    world.pool.down = True
    world.step(50)
    asked = world.pool.weighings
    world.step(30)
    assert world.pool.weighings == asked  # asked less often
    world.step(100)
    assert running(world) == ["vc-0"]
    world.pool.down = False
    world.step(61)
    assert running(world) == ["vc-0"]  # time without answers does not count
    world.step(61)
    assert running(world) == []
    demand = [
        (e.code, e.message) for e in world.repository.clusters.events("vc") if e.state == "DEMAND"
    ]
    assert demand == [
        ("POOL_UNAVAILABLE", "idle jobs are not counted: the collector site.grid does not answer"),
        ("PROGRESS", "idle jobs of the pool site are counted again"),
    ]


def test_a_job_is_noticed_within_seconds(world: World) -> None:
    ranged(world, 0, 2)
    world.step()
    asked = world.pool.weighings
    world.step(1)
    assert world.pool.weighings == asked
    world.pool.wait(1)
    world.step(3)
    assert world.repository.clusters.get("vc").target == 1


def test_a_pool_that_takes_long_to_answer_is_asked_less_often(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaling, "monotonic", count(0, 2).__next__)  # as if each answer took 2 s
    ranged(world, 0, 2)
    world.step()
    asked = world.pool.weighings
    world.step(15)
    assert world.pool.weighings == asked
    world.step(10)
    assert world.pool.weighings == asked + 1


def test_nobody_asks_for_clusters_of_a_fixed_size(world: World) -> None:
    world.apply(size=2)
    world.pool.wait(5)
    world.step()
    assert (world.pool.weighings, len(running(world))) == (0, 2)


def test_what_is_drained_or_deleted_is_not_shown(world: World) -> None:
    ranged(world, 0, 2)
    world.step()
    assert world.pool.offers == ["vc"]
    world.repository.cluster_actions.drain("vc", "root")
    world.pool.wait(1)
    world.step(11)
    assert (running(world), world.pool.offers) == ([], [])
    world.pool.wait(0)
    world.repository.cluster_actions.resume("vc", "root")
    world.step(11)
    assert world.pool.offers == ["vc"]
    world.repository.cluster_actions.delete("vc", Goal.STOP, "root")
    world.obey("n1", "n2")
    world.step(11)
    assert (clusters_of(world.repository), world.pool.offers) == ([], [])
    asked = world.pool.weighings
    world.step(100)
    assert world.pool.weighings == asked


def test_what_a_vm_says_is_remembered_for_such_vms(world: World) -> None:
    ranged(world, 0, 2)
    world.pool.wait(1)
    world.step()
    assert (world.pool.asked["vc"].learn, world.pool.asked["vc"].known) == ("", {})
    world.bring_up()
    world.pool.wait(1, known={"OpSysAndVer": "Debian13"})
    world.step(11)
    assert world.pool.asked["vc"].learn == "vc-0"
    world.pool.wait(0)
    world.step(11)
    kind = world.pool.asked["vc"]
    assert (kind.learn, kind.known) == ("", {"OpSysAndVer": "Debian13"})
    ranged(world, 0, 3)
    world.step(11)
    assert world.pool.asked["vc"].known == {"OpSysAndVer": "Debian13"}
    ranged(world, 0, 3, memory=300)
    world.step(11)
    assert world.pool.asked["vc"].known == {}  # another kind of VM


def test_who_is_woken_has_a_vm_until_nobody_needs_it(world: World) -> None:
    ranged(world, 0, 2)
    world.step()
    assert world.repository.cluster_actions.wake("vc", "site")
    assert not world.repository.cluster_actions.wake("vc", "site")
    world.step(5)
    assert running(world) == ["vc-0"]
    assert told(world) == ["1 VM: woken by a request of site"]
    world.bring_up()
    world.step(5)
    assert world.pool.asked["vc"].up == 1
    for _ in range(8):
        world.step(100)
    assert running(world) == ["vc-0"]  # only the waker knows of a job
    world.step(100)
    world.step(61)
    assert running(world) == []
    assert told(world)[1:] == ["0 VMs: no more were needed for 60 s"]
    world.obey("n1", "n2")
    assert world.repository.cluster_actions.wake("vc", "site")


def test_who_is_not_woken(world: World) -> None:
    refused(NotFound, lambda: world.repository.cluster_actions.wake("vc", "site"))
    ranged(world, 0, 0)
    assert not world.repository.cluster_actions.wake("vc", "site")
    ranged(world, 0, 2)
    world.repository.cluster_actions.drain("vc", "root")
    assert not world.repository.cluster_actions.wake("vc", "site")
    world.repository.cluster_actions.resume("vc", "root")
    world.step(5)
    assert (running(world), told(world)) == ([], [])
    assert world.repository.cluster_actions.wake("vc", "site")
    world.step(5)
    world.repository.cluster_actions.delete("vc", Goal.STOP, "root")
    assert not world.repository.cluster_actions.wake("vc", "site")
