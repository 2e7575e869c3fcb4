"""Virtual clusters in the repository: declaring, changing, draining and deleting them."""

from __future__ import annotations

import pytest

from repository.clusters import history, queries
from repository.clusters.tables import ClusterEventRow
from repository.images import Viewer
from repository.images.tables import HoldingRow
from repository.service import open_repository
from tests.kit.cluster_nodes import OPERATOR, POOLS, World, declared
from tests.kit.repository_jobs import clusters_of, push, push_library, refused
from vmjobs.cluster.spec import SizeRange
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Goal, Phase
from vmjobs.cluster.wire import ApplyOutcome
from vmjobs.config import Config
from vmjobs.errors import Conflict, ImageInUse, InvalidRequest, InvalidSpec, NotFound
from vmjobs.model import now

pytestmark = [
    pytest.mark.in_process,
    pytest.mark.settings(pools=POOLS, node_lease_seconds=300),
]


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
    world.apply(size=3, memory=512)
    world.step()
    other = world.repository.cluster_specs.assess(OPERATOR, declared("other", size=6))
    assert (other.placed, other.pending) == ({"n2": 2}, 4)
    # It replaces the present cluster.
    assert world.repository.cluster_specs.assess(OPERATOR, declared(size=8)).pending == 0
    assert [c.name for c in clusters_of(world.repository)] == ["vc"]
    refused(
        InvalidSpec, lambda: world.repository.cluster_specs.assess(OPERATOR, declared(image="nothing"))
    )


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
