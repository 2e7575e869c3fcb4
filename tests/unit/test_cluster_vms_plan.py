"""The plan for a cluster VM: a table of its decisions."""

from __future__ import annotations

import json
import math

import pytest
from pydantic import ValidationError

from tests.kit.cluster_vm_orders import NOW, cluster_vm_order, cluster_vm_record
from vmjobs.agent.cluster_vms.observations import ObservedState
from vmjobs.agent.cluster_vms.plan import (
    DESTROY_AGAIN_SECONDS,
    POWER_OFF_SECONDS,
    REFUSED_PAUSE_SECONDS,
    RENEW_AGAIN_SECONDS,
    VmAction,
    pause_after,
    plan_vm,
)
from vmjobs.agent.cluster_vms.vm_end import VmEnd
from vmjobs.cluster.spec import ClusterVmLimits
from vmjobs.cluster.vm_state import ClusterVmCode, Goal, Phase
from vmjobs.cluster.wire import ClusterVmOrder
from vmjobs.model import ExitChannel, ExitStatus, HypervisorKind

P, C, E, G = Phase, ClusterVmCode, VmAction, Goal
PANIC = VmEnd(code=C.KERNEL_PANIC, message="the guest's kernel panicked")
LOST = VmEnd(code=C.GUEST_LOST, message="the machine is gone")
WELL = ExitStatus(code=0, channel=ExitChannel.ENDPOINT)
BADLY = ExitStatus(code=3, channel=ExitChannel.ENDPOINT)
RUNS = {"phase": P.RUNNING, "incarnation": 3}
DRAINS = {"phase": P.DRAINING, "incarnation": 3, "deadline": NOW + 50}
STOPS = {"phase": P.STOPPING, "incarnation": 3}
#: No order: the service does not know the VM any more.
UNKNOWN = None

TABLE = [
    # order, record, facts -> phase, code, effects, and what else the record says
    # without a VM
    ({}, {}, {}, P.STAGING, C.PROGRESS, (E.STAGE,), {"incarnation": 1}),
    ({}, {"incarnation": 4, "failures": 2, "admitted": True, "renew": NOW}, {},
     P.STAGING, C.PROGRESS, (E.STAGE,),
     {"incarnation": 5, "failures": 2, "admitted": False, "renew": 0.0}),
    ({}, {"retry": NOW + 8, "code": C.BOOT_FAILED}, {},
     P.WAITING, C.BOOT_FAILED, (), {"until": NOW + 8}),
    ({}, {"retry": NOW + 3600}, {}, P.STAGING, C.PROGRESS, (E.STAGE,), {}),  # the clock was set back
    ({"admitted": 7, "condemned": 9}, {}, {}, P.STAGING, C.PROGRESS, (E.STAGE,), {"incarnation": 10}),
    ({"goal": G.DRAIN}, {"retry": NOW + 8}, {}, P.GONE, C.DRAINED, (), {"retry": 0.0}),
    ({"goal": G.STOP}, {}, {}, P.GONE, C.STOPPED, (), {}),
    (UNKNOWN, {}, {}, P.WAITING, C.PROGRESS, (E.FORGET,), {}),
    ({}, {"phase": P.GONE, "code": C.DRAINED}, {}, P.GONE, C.DRAINED, (), {"until": math.inf}),
    (UNKNOWN, {"phase": P.GONE}, {}, P.GONE, C.PROGRESS, (E.FORGET,), {}),
    # staging and booting
    ({}, {"phase": P.STAGING, "incarnation": 1}, {"working": True},
     P.STAGING, C.PROGRESS, (), {"until": math.inf}),
    ({}, {"phase": P.STAGING, "incarnation": 1}, {}, P.STAGING, C.PROGRESS, (E.STAGE,),
     {"incarnation": 1}),
    ({}, {"phase": P.STAGING, "incarnation": 1}, {"staged": HypervisorKind.UML},
     P.BOOTING, C.PROGRESS, (E.BOOT,),
     {"deadline": NOW + 60, "until": NOW + 60, "hypervisor": HypervisorKind.UML}),
    ({}, {"phase": P.STAGING, "incarnation": 1}, {"end": PANIC},
     P.STOPPING, C.KERNEL_PANIC, (E.DESTROY,), {"failing": True}),
    *[({"goal": goal}, {"phase": phase, "incarnation": 1}, {"working": True},
       phase, C.PROGRESS, (E.ABORT,), {})
      for goal in (G.DRAIN, G.STOP) for phase in (P.STAGING, P.BOOTING)],
    (UNKNOWN, {"phase": P.STAGING, "incarnation": 1}, {"working": True},
     P.STAGING, C.PROGRESS, (E.ABORT,), {}),
    ({"goal": G.DRAIN}, {"phase": P.BOOTING, "incarnation": 1}, {},
     P.STOPPING, C.DRAINED, (E.DESTROY,), {}),
    ({}, {"phase": P.BOOTING, "incarnation": 1, "deadline": NOW + 5}, {},
     P.BOOTING, C.PROGRESS, (), {"until": NOW + 5}),
    ({}, {"phase": P.BOOTING, "incarnation": 1, "deadline": NOW + 5}, {"ready": True},
     P.RUNNING, C.PROGRESS, (), {"deadline": 0.0, "until": math.inf}),
    ({}, {"phase": P.BOOTING, "incarnation": 1, "deadline": NOW}, {"ready": True},
     P.RUNNING, C.PROGRESS, (), {}),
    ({}, {"phase": P.BOOTING, "incarnation": 1, "deadline": NOW}, {},
     P.STOPPING, C.BOOT_TIMED_OUT, (E.DESTROY,), {"failing": True, "deadline": 0.0}),
    # running
    ({}, RUNS, {}, P.RUNNING, C.PROGRESS, (), {"until": math.inf}),
    ({"admitted": 2}, RUNS, {}, P.RUNNING, C.PROGRESS, (), {"admitted": False}),
    ({"admitted": 3}, {**RUNS, "failures": 4}, {},
     P.RUNNING, C.PROGRESS, (E.TELL_ADMITTED,), {"admitted": True, "failures": 0}),
    ({"admitted": 3}, {**RUNS, "admitted": True}, {}, P.RUNNING, C.PROGRESS, (), {}),
    ({}, RUNS, {"renewed": NOW + 300}, P.RUNNING, C.PROGRESS, (),
     {"renew": NOW + 300, "until": NOW + 300}),
    ({}, {**RUNS, "renew": NOW}, {}, P.RUNNING, C.PROGRESS, (E.RENEW,),
     {"renew": NOW + RENEW_AGAIN_SECONDS}),
    ({}, RUNS, {"end": PANIC}, P.STOPPING, C.KERNEL_PANIC, (E.DESTROY,), {"failing": True}),
    ({}, {**RUNS, "admitted": True}, {"end": PANIC},
     P.STOPPING, C.KERNEL_PANIC, (E.DESTROY,), {"failing": False}),
    ({}, RUNS, {"exit": WELL, "exit_at": NOW}, P.RUNNING, C.PROGRESS, (),
     {"until": NOW + POWER_OFF_SECONDS}),
    ({}, RUNS, {"exit": BADLY, "exit_at": NOW - POWER_OFF_SECONDS},
     P.STOPPING, C.GUEST_ENDED, (E.DESTROY,), {"message": "the guest's script ended with status 3"}),
    # the script ended because it got no token: the service's fault, however the VM ended
    ({}, RUNS, {"exit": BADLY, "exit_at": NOW - POWER_OFF_SECONDS, "refused": "no key"},
     P.STOPPING, C.TOKEN_REFUSED, (E.DESTROY,),
     {"failing": False, "message": "it got no token for the pool: no key"}),
    ({}, RUNS, {"exit": BADLY, "exit_at": NOW, "refused": "no key", "end": LOST},
     P.STOPPING, C.TOKEN_REFUSED, (E.DESTROY,), {"failing": False}),
    ({}, RUNS, {"end": PANIC, "refused": "no key"},
     P.STOPPING, C.KERNEL_PANIC, (E.DESTROY,), {"failing": True}),
    ({"condemned": 2, "why": C.JOIN_TIMED_OUT}, RUNS, {}, P.RUNNING, C.PROGRESS, (), {}),
    ({"condemned": 3, "why": C.JOIN_TIMED_OUT, "why_message": "not in the pool"}, RUNS, {},
     P.STOPPING, C.JOIN_TIMED_OUT, (E.DESTROY,), {"failing": True, "message": "not in the pool"}),
    # it could not join: the service gave it no token
    ({"condemned": 3, "why": C.JOIN_TIMED_OUT}, RUNS, {"refused": "no key"},
     P.STOPPING, C.TOKEN_REFUSED, (E.DESTROY,),
     {"failing": False, "message": "it got no token for the pool: no key"}),
    # its first token brought it into the pool; the lack of a second one is not why it left
    ({"condemned": 3, "why": C.JOIN_TIMED_OUT}, {**RUNS, "admitted": True}, {"refused": "no key"},
     P.STOPPING, C.JOIN_TIMED_OUT, (E.DESTROY,), {"failing": True}),
    ({"condemned": 3, "why": C.PROBE_FAILED}, {**RUNS, "admitted": True}, {},
     P.STOPPING, C.PROBE_FAILED, (E.DESTROY,), {"failing": True}),
    ({"goal": G.STOP}, RUNS, {}, P.STOPPING, C.STOPPED, (E.DESTROY,), {}),
    (UNKNOWN, RUNS, {}, P.STOPPING, C.STOPPED, (E.DESTROY,), {}),
    # draining
    ({"goal": G.DRAIN}, RUNS, {}, P.DRAINING, C.PROGRESS, (E.TELL_DRAIN,),
     {"deadline": NOW + 1000, "until": NOW + 1000}),
    ({"goal": G.DRAIN, "admitted": 3}, RUNS, {},
     P.DRAINING, C.PROGRESS, (E.TELL_ADMITTED, E.TELL_DRAIN), {}),
    ({"goal": G.DRAIN}, DRAINS, {}, P.DRAINING, C.PROGRESS, (), {"until": NOW + 50}),
    ({"goal": G.DRAIN}, {**DRAINS, "deadline": NOW}, {},
     P.STOPPING, C.DRAIN_TIMED_OUT, (E.DESTROY,), {}),
    ({"goal": G.DRAIN}, {**DRAINS, "renew": NOW - 1}, {}, P.DRAINING, C.PROGRESS, (E.RENEW,), {}),
    ({"goal": G.DRAIN}, DRAINS, {"exit": WELL, "end": PANIC},
     P.STOPPING, C.DRAINED, (E.DESTROY,), {}),
    ({"goal": G.DRAIN}, DRAINS, {"exit": WELL, "exit_at": NOW - POWER_OFF_SECONDS},
     P.STOPPING, C.DRAINED, (E.DESTROY,), {}),
    ({"goal": G.DRAIN}, DRAINS, {"end": PANIC}, P.STOPPING, C.KERNEL_PANIC, (E.DESTROY,), {}),
    ({"goal": G.STOP}, DRAINS, {}, P.STOPPING, C.STOPPED, (E.DESTROY,), {}),
    # stopping
    ({}, STOPS, {"working": True}, P.STOPPING, C.PROGRESS, (), {}),
    ({}, STOPS, {}, P.STOPPING, C.PROGRESS, (E.DESTROY,), {"retry": NOW + DESTROY_AGAIN_SECONDS}),
    ({}, {**STOPS, "retry": NOW + 4}, {}, P.STOPPING, C.PROGRESS, (), {"until": NOW + 4}),
    ({}, {**STOPS, "code": C.GUEST_ENDED, "token": "t", "machine": "m"}, {"destroyed": True},
     P.WAITING, C.GUEST_ENDED, (), {"failures": 0, "until": NOW, "token": "", "machine": ""}),
    ({}, {**STOPS, "failing": True}, {"destroyed": True},
     P.WAITING, C.PROGRESS, (), {"failures": 1, "retry": NOW + 1, "failing": False}),
    ({}, {**STOPS, "failing": True, "failures": 3}, {"destroyed": True},
     P.WAITING, C.PROGRESS, (), {"failures": 4, "until": NOW + 8}),
    ({}, {**STOPS, "code": C.TOKEN_REFUSED, "failures": 2}, {"destroyed": True},
     P.WAITING, C.TOKEN_REFUSED, (), {"failures": 2, "until": NOW + REFUSED_PAUSE_SECONDS}),
    ({}, {**STOPS, "code": C.TOKEN_REFUSED, "failures": 8}, {"destroyed": True},
     P.WAITING, C.TOKEN_REFUSED, (), {"failures": 8, "until": NOW + 128}),
    ({"goal": G.DRAIN}, {**STOPS, "code": C.DRAIN_TIMED_OUT}, {"destroyed": True},
     P.GONE, C.DRAIN_TIMED_OUT, (), {}),
    ({"goal": G.STOP}, {**STOPS, "code": C.GUEST_LOST}, {"destroyed": True}, P.GONE, C.STOPPED, (), {}),
    (UNKNOWN, STOPS, {"destroyed": True}, P.STOPPING, C.PROGRESS, (E.FORGET,), {}),
]  # fmt: skip


@pytest.mark.parametrize(("order", "record", "facts", "phase", "code", "effects", "also"), TABLE)
def test_what_is_done(
    order: dict[str, object] | None,
    record: dict[str, object],
    facts: dict[str, object],
    phase: Phase,
    code: ClusterVmCode,
    effects: tuple[VmAction, ...],
    also: dict[str, object],
) -> None:
    wanted = cluster_vm_order(**order) if order is not None else None
    decision = plan_vm(wanted, cluster_vm_record(wanted, **record), ObservedState(**facts), NOW)
    assert (decision.record.phase, decision.record.code, decision.effects) == (phase, code, effects)
    for name, value in also.items():
        found = decision.until if name == "until" else getattr(decision.record, name)
        assert found == value, name


def test_pauses_double_up_to_five_minutes() -> None:
    assert [pause_after(n) for n in range(11)] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert pause_after(10_000) == 300


def test_a_new_order_is_remembered_and_the_phase_knows_since_when_it_is() -> None:
    record = cluster_vm_record(phase=P.RUNNING, incarnation=1)
    drained = plan_vm(cluster_vm_order(goal=G.DRAIN), record, ObservedState(), NOW).record
    assert drained.order.goal is G.DRAIN
    assert (record.since, drained.since) == (NOW - 100, NOW)


def test_what_the_service_is_told() -> None:
    waiting = cluster_vm_record(retry=NOW, failures=2, incarnation=2, code=C.BOOT_FAILED, message="no")
    told = waiting.report()
    assert (told.id, told.incarnation, told.failures) == (waiting.order.id, 2, 2)
    assert told.retry.timestamp() == NOW
    assert told.since.timestamp() == NOW - 100
    assert cluster_vm_record(phase=P.STOPPING, retry=NOW).report().retry is None


def test_why_a_vm_cannot_be_destroyed_is_told_until_it_is() -> None:
    record = cluster_vm_record(code=C.GUEST_LOST, message="it fell silent", **STOPS)
    seen = ObservedState(undestroyed="libvirt does not answer")
    again = plan_vm(record.order, record, seen, NOW).record
    told = again.report()
    assert told.code is C.GUEST_LOST
    assert told.message == "it cannot be destroyed: libvirt does not answer; it fell silent"
    # ... and only once, however often the agent tries
    later = NOW + DESTROY_AGAIN_SECONDS
    assert plan_vm(record.order, again, seen, later).record.report().message == told.message
    gone = plan_vm(record.order, again, ObservedState(destroyed=True), later).record
    assert gone.report().message == "it fell silent"
    assert len(again.with_changes(message="x" * 8192).report().message) == 8192


def test_a_guest_cannot_make_a_report_that_is_too_long() -> None:
    record = cluster_vm_record(phase=P.RUNNING, incarnation=1)
    told = VmEnd(code=C.GUEST_ENDED, message="x" * 100_000)
    assert (
        len(plan_vm(record.order, record, ObservedState(end=told), NOW).record.report().message) == 8192
    )


def test_limits_that_nothing_enforces_are_told_for_as_long_as_the_vm_runs() -> None:
    record = cluster_vm_record(phase=P.STAGING, incarnation=1)
    facts = ObservedState(staged=HypervisorKind.UML, unenforced="its disks are as fast as they are")
    booting = plan_vm(record.order, record, facts, NOW).record
    assert booting.report().message == "its disks are as fast as they are"
    running = plan_vm(record.order, booting, ObservedState(ready=True), NOW).record
    assert running.report().message == "its disks are as fast as they are"


def test_how_long_each_phase_took_is_told() -> None:
    record = cluster_vm_record(phase=P.STAGING, incarnation=1)
    booting = plan_vm(record.order, record, ObservedState(staged=HypervisorKind.UML), NOW).record
    running = plan_vm(record.order, booting, ObservedState(ready=True), NOW + 2.5).record
    assert running.report().seconds == {"staging": 100.0, "booting": 2.5}


def test_an_order_of_a_newer_service_is_read_with_its_limits() -> None:
    words = {**cluster_vm_order().model_dump(mode="json"), "mood": "good"}
    words["limits"] = {"cpu_percent": 50, "gpu_percent": 10}
    words["pool"] = {**words["pool"], "shape": "round"}
    order = ClusterVmOrder.model_validate_json(json.dumps(words))
    assert order.limits == ClusterVmLimits(cpu_percent=50)
    assert ClusterVmOrder.model_validate_json(order.model_dump_json()) == order
    with pytest.raises(ValidationError):
        ClusterVmLimits.model_validate({"gpu_percent": 10})
    with pytest.raises(ValidationError):
        ClusterVmOrder.model_validate({**words, "limits": {"cpu_percent": "50"}})
