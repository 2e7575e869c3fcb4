"""``vmjobs cluster`` commands that declare and change clusters, and what they wait for."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests.kit.cli import Run
from tests.kit.cluster_service import (
    DECLARED,
    FAILED,
    IMAGE,
    NEW_IMAGE,
    NOW,
    SPEC,
    Service,
    cluster,
    image_detail,
    service,
    vm,
    vmjobs,
)
from vmjobs.cli.cluster.common import changed_fields
from vmjobs.cli.cluster.wait import has_settled
from vmjobs.cluster.spec import ClusterSpec, SizeRange
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Goal
from vmjobs.cluster.wire import ApplyOutcome, Assessment, ClusterVm
from vmjobs.errors import Conflict

__all__ = ["service", "vmjobs"]


def test_changes_are_told_field_by_field() -> None:
    old = SPEC.model_copy(update={"attributes": {"A": 1, "B": "x"}})
    new = ClusterSpec(
        name="workers", image="worker:2", size=SizeRange(min=1, max=2), attributes={"A": True, "C": 2.5}
    )
    assert [str(change) for change in changed_fields(cluster(spec=old), new, IMAGE)] == [
        "image: worker -> worker:2",
        'size: 2 -> {"min": 1, "max": 2}',
        "attributes.A: 1 -> true",
        "attributes.C: none -> 2.5",
        "attributes.B: x -> none",
    ]


def test_what_failed_is_what_changes_are_to() -> None:
    assert changed_fields(cluster(failed=FAILED), FAILED.spec, NEW_IMAGE) == []
    assert [c.field for c in changed_fields(cluster(failed=FAILED), SPEC, IMAGE)] == ["image"]


def test_apply_creates(service: Service, vmjobs: Run) -> None:
    service.applies(ApplyOutcome.CREATED)
    done = vmjobs("apply", "c.yaml")
    assert (done.code, done.out) == (0, "workers created, 2 VMs of worker\n")
    assert service.bodies[-1]["size"] == 2


def test_apply_says_what_it_changed(service: Service, vmjobs: Run) -> None:
    service.has(cluster(spec=SPEC.model_copy(update={"memory": 512})))
    service.applies(ApplyOutcome.CHANGED)
    assert vmjobs("apply", "c.yaml").out == "workers changed\n  memory: 512 -> 1024\n"
    service.applies(ApplyOutcome.UNCHANGED)
    assert vmjobs("apply", "c.yaml").out == "workers unchanged\n"
    (found,) = json.loads(vmjobs("apply", "--json", "c.yaml").out)
    assert (found["outcome"], found["changes"]) == ("unchanged", [])
    assert found["cluster"]["name"] == "workers"


def test_nothing_is_applied_if_the_service_finds_a_fault(service: Service, vmjobs: Run) -> None:
    Path("d.yaml").write_text("image: worker\nname: other\nsize: 1\n")
    faults = (("spec.image", "there is no image 'worker'"), ("pool", "there is no pool"))
    service.refuses("POST /v1/cluster-assessments", 422, "INVALID_SPEC", "has faults", *faults)
    done = vmjobs("apply", "c.yaml", "d.yaml", code=64)
    assert "c.yaml:2:1: image: there is no image 'worker'" in done.err
    assert "c.yaml:1:1: pool: there is no pool" in done.err
    assert "d.yaml:1:1: image: there is no image 'worker'" in done.err
    assert not any(request.startswith("PUT") for request in service.asked)


def test_apply_waits_until_all_are_up(service: Service, vmjobs: Run) -> None:
    service.applies(ApplyOutcome.CREATED)
    service.has(
        cluster(),
        cluster(vm(0, ClusterVmState.BOOTING), vm(1, ClusterVmState.STAGING)),
        cluster(vm(0), vm(1, ClusterVmState.PROBING)),
        cluster(vm(0), vm(1)),
    )
    done = vmjobs("apply", "--wait", "c.yaml", code=0)
    assert "workers-0 BOOTING on node1\nworkers-1 STAGING on node1\nworkers-0 UP on node1" in done.err


def test_apply_says_why_not_all_are_up_in_time(service: Service, vmjobs: Run) -> None:
    failed = {"code": ClusterVmCode.BOOT_FAILED, "message": "no init found\nmore of it"}
    service.applies(ApplyOutcome.CREATED)
    waiting = cluster(vm(0), vm(1, ClusterVmState.BACKOFF, **failed))
    service.has(waiting)
    done = vmjobs("apply", "--wait", "--timeout", "0.2", "c.yaml", code=124)
    assert "workers: 1 of 2 UP (1 BACKOFF)" in done.err
    assert "  workers-1 BACKOFF on node1: BOOT_FAILED: no init found\n" in done.err


@pytest.mark.parametrize(
    "words",
    [
        ("apply", "c.yaml"),
        ("scale", "workers", "2"),
        ("upgrade", "workers", "worker"),
        ("retry", "workers"),
        ("drain", "workers"),
        ("delete", "--now", "workers"),
    ],
    ids=lambda words: words[0],
)
def test_nobody_is_waited_for_for_ever_unasked(
    service: Service, vmjobs: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    over = words[0] in {"drain", "delete"}
    state = ClusterVmState.DRAINING if over else ClusterVmState.PENDING
    why = {"code": ClusterVmCode.NO_ROOM, "message": "no node has room", "busy": over}
    there = cluster(vm(0, state, **why), draining=over)
    service.applies(ApplyOutcome.CHANGED)
    for request in ("GET", "DELETE"):
        service.says(f"{request} /v1/clusters/workers{'?mode=now' * (request == 'DELETE')}", there)
    for verb in ("scale", "retry", "drain"):
        service.says(f"POST /v1/clusters/workers/{verb}", there)
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    done = vmjobs(*words, "--wait", code=124)
    assert "after 1800 s: workers: " in done.err
    assert f"  workers-0 {state} on node1: NO_ROOM: no node has room" in done.err
    assert "`vmjobs cluster show workers`" in done.err
    assert len([request for request in service.asked if request == "GET /v1/clusters/workers"]) > 2


def test_drain_and_delete_wait_until_vms_have_ended(service: Service, vmjobs: Run) -> None:
    draining = cluster(vm(0, ClusterVmState.DRAINING, busy=True), draining=True)
    service.says("POST /v1/clusters/workers/drain", draining)
    service.has(draining, cluster(vm(0, ClusterVmState.GONE), draining=True))
    done = vmjobs("drain", "workers", "--wait")
    assert (done.code, done.out) == (0, "workers is draining: 1 VM up, 1 of them with jobs\n")
    assert "workers-0 GONE on node1" in done.err
    service.has(draining, cluster(vm(0)))
    done = vmjobs("drain", "workers", "--wait", code=Conflict.exit_code)
    assert "workers was resumed" in done.err
    deleting = cluster(vm(0, ClusterVmState.STOPPING), deleting=True)
    service.says("DELETE /v1/clusters/workers?mode=now", deleting)
    another = cluster(vm(0), created=NOW + timedelta(seconds=1))
    service.has(deleting, deleting, another)
    assert vmjobs("delete", "--now", "workers", "--wait", "--timeout", "5").code == 0


def test_a_command_waits_for_ever_where_it_is_told_to(service: Service, vmjobs: Run) -> None:
    service.has(cluster(), cluster(), cluster(vm(0), vm(1)))
    service.says("POST /v1/clusters/workers/retry", cluster())
    assert vmjobs("retry", "workers", "--wait", "--timeout", "inf").code == 0


def test_what_failed_is_said_and_not_waited_for(service: Service, vmjobs: Run) -> None:
    service.applies(ApplyOutcome.UNCHANGED, failed=FAILED)
    service.has(cluster(vm(0), vm(1), failed=FAILED))
    hint = "fix the declaration, or retry it: `vmjobs cluster retry workers`"
    assert vmjobs("apply", "c.yaml").out == f"workers unchanged\n  {FAILED.message}; {hint}\n"
    done = vmjobs("apply", "--wait", "c.yaml", code=Conflict.exit_code)
    assert FAILED.message in done.err
    service.says("POST /v1/clusters/workers/scale", cluster(failed=FAILED))
    assert vmjobs("scale", "workers", "2", "--wait").code == 0


def test_apply_does_not_wait_for_a_cluster_that_is_drained(service: Service, vmjobs: Run) -> None:
    service.applies(ApplyOutcome.UNCHANGED)
    service.has(cluster(draining=True))
    done = vmjobs("apply", "--wait", "c.yaml", code=65)
    assert "vmjobs cluster resume workers" in done.err


@pytest.mark.parametrize(
    ("vms", "is_settled"),
    [
        ((vm(0), vm(1)), True),
        ((vm(0),), False),
        ((vm(0), vm(1, generation=2)), False),
        ((vm(0, goal=Goal.DRAIN), vm(1)), False),
        ((vm(0), vm(1), vm(2, ClusterVmState.LOST)), True),
        ((vm(0), vm(1), vm(2, ClusterVmState.DRAINING, goal=Goal.DRAIN)), True),
        ((vm(0), vm(1, ClusterVmState.JOINING)), False),
    ],
)
def test_settled_is_as_many_up_as_wanted_as_they_are_declared(
    vms: tuple[ClusterVm, ...], is_settled: bool
) -> None:
    assert has_settled(cluster(*vms)) is is_settled


def test_diff_exits_as_diff_does(service: Service, vmjobs: Run) -> None:
    service.says("GET /v1/images/worker", image_detail())
    done = vmjobs("diff", "c.yaml")
    assert (done.code, done.out) == (1, "workers would be created\n")
    service.has(cluster())
    done = vmjobs("diff", "c.yaml")
    assert (done.code, done.out) == (0, "")
    service.says("GET /v1/images/worker", image_detail(NEW_IMAGE))
    Path("c.yaml").write_text(f"{DECLARED}site: grid\n")
    done = vmjobs("diff", "c.yaml", code=1)
    assert done.out.splitlines() == [
        "workers would be changed",
        "  image: worker (111111111111) -> worker (222222222222)",
        '  site: "" -> grid',
    ]
    (found,) = json.loads(vmjobs("diff", "--json", "c.yaml").out)
    assert found["changes"][1] == {"field": "site", "old": "", "new": "grid"}
    assert not any(not request.startswith("GET") for request in service.asked)


def test_validate_tells_where_there_is_room(service: Service, vmjobs: Run) -> None:
    done = vmjobs("validate", "c.yaml")
    assert done.out == "c.yaml: workers: valid; there is room for 2 VMs (2 on node1)\n"
    scarce = Assessment(placed={"node1": 1}, pending=1, why="no node has room")
    service.says("POST /v1/cluster-assessments", scarce)
    done = vmjobs("validate", "c.yaml", code=0)
    assert "room for 1 VM (1 on node1); 1 would be PENDING: no node has room" in done.out
    done = vmjobs("validate", "--capacity", "c.yaml", code=64)
    assert "c.yaml:3:1: size: 1 VM would be PENDING: no node has room" in done.err


def test_validate_as_json_has_the_places(service: Service, vmjobs: Run) -> None:
    service.refuses("POST /v1/cluster-assessments", 422, "INVALID_SPEC", "no", ("image", "no such"))
    done = vmjobs("validate", "--json", "c.yaml", code=64)
    (finding,) = json.loads(done.out)["findings"]
    said = {"field": "image", "code": "x", "message": "no such"}
    assert finding == {"file": "c.yaml", "line": 2, "column": 1, **said}


def test_validate_without_a_service(vmjobs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMJOBS_TOKEN_FILE", "/nowhere")
    done = vmjobs("validate", "c.yaml", code=77)
    assert vmjobs("validate", "--offline", "c.yaml").code == 0
    Path("c.yaml").write_text(f"{DECLARED}cpu: 2\n")
    done = vmjobs("validate", "c.yaml", code=64)
    assert "c.yaml:4:1: cpu: there is no such field; did you mean cpus?" in done.err
    assert "the service was not asked" in done.err


def test_scale_and_drain_and_resume(service: Service, vmjobs: Run) -> None:
    service.has(cluster())
    service.says("POST /v1/clusters/workers/scale", cluster(target=5))
    assert vmjobs("scale", "workers", "5").out == "workers: 2 -> 5 VMs\n"
    assert service.bodies == [{"size": 5}]
    service.says("POST /v1/clusters/workers/drain", cluster(vm(0, busy=True), vm(1)))
    assert vmjobs("drain", "workers").out == "workers is draining: 2 VMs up, 1 of them with jobs\n"
    service.says("POST /v1/clusters/workers/resume", cluster(vm(0)))
    assert vmjobs("resume", "workers").out == "workers is resumed: 2 VMs wanted, 1 UP\n"


def test_upgrade_declares_another_image_and_nothing_else(service: Service, vmjobs: Run) -> None:
    spec = SPEC.model_copy(update={"attributes": {"A": True}, "memory": 512})
    service.has(cluster(spec=spec))
    new = spec.model_copy(update={"image": "worker:2"})
    service.applies(ApplyOutcome.CHANGED, spec=new, image=NEW_IMAGE)
    done = vmjobs("upgrade", "workers", "worker:2")
    assert done.out == ("workers changed\n  image: worker (111111111111) -> worker:2 (222222222222)\n")
    assert service.bodies == [new.model_dump(mode="json")]


def test_delete_asks_where_vms_are_up(service: Service, vmjobs: Run) -> None:
    there = cluster(vm(0, busy=True), vm(1))
    service.has(there)
    service.says("DELETE /v1/clusters/workers?mode=drain", there)
    service.says("DELETE /v1/clusters/workers?mode=now", there)
    done = vmjobs("delete", "workers", stdin="n\n", code=1)
    assert "workers: 2 VMs up, 1 of them with jobs. Delete it once its jobs have ended?" in done.err
    assert not any(request.startswith("DELETE") for request in service.asked)
    assert vmjobs("delete", "workers").code == 1  # no answer
    done = vmjobs("delete", "workers", stdin="y\n")
    assert done.out.endswith("workers is deleted; 2 VMs will stop once their jobs have ended\n")
    assert service.asked[-1].endswith("mode=drain")
    assert vmjobs("delete", "--now", "workers").out.endswith("2 VMs will stop at once\n")
    assert vmjobs("delete", "--yes", "workers").code == 0
    assert service.asked[-1].endswith("mode=drain")
    service.has(cluster())  # no question if no VM is up
    service.says("DELETE /v1/clusters/workers?mode=drain", cluster(deleting=True))
    assert vmjobs("delete", "workers").out == "workers is deleted\n"
