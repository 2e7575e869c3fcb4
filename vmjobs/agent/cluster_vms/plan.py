"""Plans actions for a cluster VM: a pure function of order, record and observed state.

====================  =====================================  ====================================
phase                 goal RUN                               otherwise
====================  =====================================  ====================================
WAITING               staged after its pause                 GONE at once
STAGING, BOOTING      becomes RUNNING before its deadline    destroyed: it has no job
RUNNING               signalled once when it is admitted     DRAIN: signalled once, then DRAINING
DRAINING              (goals only go forward)                destroyed at its deadline
STOPPING              destroyed, then WAITING                destroyed, then GONE
GONE                  as WAITING, if a restart is requested  until it is removed from the assignment
====================  =====================================  ====================================

A VM that ended or is condemned, and any VM with the goal STOP, becomes STOPPING from every phase. A
cluster VM that is missing from the assignment is destroyed and forgotten.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from enum import Enum, auto

from vmjobs.agent.cluster_vms.observations import ObservedState
from vmjobs.agent.cluster_vms.record import MAX_MESSAGE_CHARACTERS, ClusterVmRecord
from vmjobs.agent.cluster_vms.vm_end import VmEnd, end_by_exit
from vmjobs.cluster.vm_state import ClusterVmCode, Goal, Phase
from vmjobs.cluster.wire import ClusterVmOrder

FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 300.0
#: Seconds for a guest to power off after its script has ended.
POWER_OFF_SECONDS = 15.0
#: Seconds between attempts to renew a token.
RENEW_AGAIN_SECONDS = 30.0
#: Minimum seconds until the next incarnation after the service has refused a token.
REFUSED_PAUSE_SECONDS = 30.0
#: Seconds between attempts to destroy a VM.
DESTROY_AGAIN_SECONDS = 10.0

NEW_TOKEN_SIGNAL = signal.SIGUSR2
DRAIN_SIGNAL = signal.SIGTERM


class VmAction(Enum):
    """An action of the reconciler, taken after the record is stored.

    STAGE: fetch the image, choose a hypervisor. BOOT: make and start the VM. ABORT: cancel STAGE or
    BOOT. DESTROY: destroy the VM, and verify it. TELL_ADMITTED, TELL_DRAIN: signal the guest.
    RENEW: get a new token, then signal the guest. FORGET: remove the cluster VM and all its files.
    """

    STAGE = auto()
    BOOT = auto()
    ABORT = auto()
    DESTROY = auto()
    TELL_ADMITTED = auto()
    TELL_DRAIN = auto()
    RENEW = auto()
    FORGET = auto()


@dataclass(frozen=True)
class VmPlan:
    """The next record, the actions, and the time of the next planning (seconds since 1970)."""

    record: ClusterVmRecord
    effects: tuple[VmAction, ...] = ()
    until: float = math.inf


def pause_after(failures: int) -> float:
    """Return seconds between two incarnations after so many failures in a row."""
    if failures == 0:
        return 0.0
    return min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 30))


def plan_vm(
    order: ClusterVmOrder | None, record: ClusterVmRecord, observed: ObservedState, now: float
) -> VmPlan:
    """Plan the next actions for a cluster VM.

    order: None: the assignment of this node no longer contains it.
    """
    if order is not None and order != record.order:
        record = record.with_changes(order=order)
    if observed.renewed:
        record = record.with_changes(renew=observed.renewed)
    wanted = order is not None
    if observed.destroyed:
        return _destroyed(record, now, wanted=wanted)
    if record.phase in {Phase.WAITING, Phase.GONE}:
        return _without_vm(record, now, wanted=wanted, again=observed.again)
    if record.phase is Phase.STOPPING:
        return _stopping(record, observed, now)
    if record.phase is Phase.BOOTING and observed.ready:
        # Keep the message: it lists the limits that are not enforced.
        record = _with_duration(record, now).enter(
            Phase.RUNNING, ClusterVmCode.PROGRESS, record.message, now
        )
    end = _end_by_order(record, observed, wanted=wanted) or _end_by_observation(record, observed, now)
    if end is None:
        return _plan_running(record, observed, now)
    return VmPlan(record, (VmAction.ABORT,)) if observed.working else _plan_stop(record, end, now)


# --------------------------------------------------------------------------- without a VM


def _without_vm(record: ClusterVmRecord, now: float, *, wanted: bool, again: bool) -> VmPlan:
    if not wanted:
        return VmPlan(record, (VmAction.FORGET,))
    if record.phase is Phase.GONE and not (again and record.order.goal is Goal.RUN):
        return VmPlan(record)
    if record.order.goal is not Goal.RUN:
        return VmPlan(_gone_record(record, now))
    if record.phase is Phase.GONE:
        record = record.with_changes(failures=0)
    # Never wait longer than the longest pause, even if the clock was set back.
    if now < record.retry <= now + MAX_PAUSE_SECONDS:
        return VmPlan(record, until=record.retry)
    # After a loss of records, continue with numbers that the service has not seen yet.
    last = max(record.incarnation, record.order.admitted, record.order.condemned)
    fresh = record.enter(Phase.STAGING, ClusterVmCode.PROGRESS, "", now).with_changes(
        incarnation=last + 1,
        failing=False,
        retry=0.0,
        deadline=0.0,
        renew=0.0,
        hypervisor=None,
        admitted=False,
        seconds={},
    )
    return VmPlan(fresh, (VmAction.STAGE,))


def _gone_record(record: ClusterVmRecord, now: float) -> ClusterVmRecord:
    """Return the record in the phase GONE; keep the reason that ended a drained VM."""
    code, message = record.code, record.message
    if record.order.goal is Goal.STOP:
        code, message = ClusterVmCode.STOPPED, "stopped"
    elif record.phase is Phase.WAITING:
        code, message = ClusterVmCode.DRAINED, "it had no VM"
    return record.enter(Phase.GONE, code, message, now).with_changes(retry=0.0, machine="")


def _destroyed(record: ClusterVmRecord, now: float, *, wanted: bool) -> VmPlan:
    if not wanted:
        return VmPlan(record, (VmAction.FORGET,))
    if record.order.goal is not Goal.RUN:
        return VmPlan(_gone_record(record, now))
    failures = record.failures + record.failing
    # A refused token is no failure of the VM: it only causes a pause.
    pause = REFUSED_PAUSE_SECONDS if record.code is ClusterVmCode.TOKEN_REFUSED else 0.0
    retry = now + max(pause_after(failures), pause)
    waiting = record.enter(Phase.WAITING, record.code, record.message, now)
    return VmPlan(
        waiting.with_changes(
            failures=failures, failing=False, retry=retry, machine="", token="", sentinel=""
        ),
        until=retry,
    )


# --------------------------------------------------------------------------- with a VM


def _plan_stop(record: ClusterVmRecord, end: VmEnd, now: float) -> VmPlan:
    condemned = record.order.condemned >= record.incarnation
    refused = end.code is ClusterVmCode.TOKEN_REFUSED
    failing = not refused and (condemned or not record.admitted)
    stopping = record.enter(Phase.STOPPING, end.code, end.message, now)
    stopping = stopping.with_changes(failing=failing, retry=0.0, deadline=0.0, undestroyed="")
    return VmPlan(stopping, (VmAction.DESTROY,))


def _stopping(record: ClusterVmRecord, observed: ObservedState, now: float) -> VmPlan:
    if observed.undestroyed:
        record = record.with_changes(undestroyed=observed.undestroyed[:MAX_MESSAGE_CHARACTERS])
    if observed.working:
        return VmPlan(record)
    if now < record.retry <= now + MAX_PAUSE_SECONDS:
        return VmPlan(record, until=record.retry)
    return VmPlan(record.with_changes(retry=now + DESTROY_AGAIN_SECONDS), (VmAction.DESTROY,))


def _end_by_order(record: ClusterVmRecord, observed: ObservedState, *, wanted: bool) -> VmEnd | None:
    """Return why the service orders the VM's end now, if it does."""
    order = record.order
    if not wanted:
        return VmEnd(ClusterVmCode.STOPPED, "the service has removed it from this node")
    if order.goal is Goal.STOP:
        return VmEnd(ClusterVmCode.STOPPED, "stopped")
    if order.goal is Goal.DRAIN and record.phase in {Phase.STAGING, Phase.BOOTING}:
        return VmEnd(ClusterVmCode.DRAINED, "it had not started to run jobs")
    if order.condemned >= record.incarnation:
        # Without a token it could not join the pool: the refusal is the cause of the timeout.
        late = order.why is ClusterVmCode.JOIN_TIMED_OUT and observed.refused and not record.admitted
        return _token_refused(observed) if late else VmEnd(order.why, order.why_message)
    return None


def _end_by_observation(record: ClusterVmRecord, observed: ObservedState, now: float) -> VmEnd | None:
    """Return why the VM must be destroyed now: it ended, or exceeded a deadline."""
    if observed.end is not None:
        return _end_after_drain(record, observed) or _end_without_token(observed) or observed.end
    if observed.exit is not None and now >= observed.exit_at + POWER_OFF_SECONDS:
        last = end_by_exit(observed.exit)
        return _end_after_drain(record, observed) or _end_without_token(observed) or last
    if record.deadline == 0.0 or now < record.deadline:
        return None
    return _end_by_deadline(record)


def _end_after_drain(record: ClusterVmRecord, observed: ObservedState) -> VmEnd | None:
    if record.phase is Phase.DRAINING and observed.exit is not None and observed.exit.ok:
        return VmEnd(ClusterVmCode.DRAINED, "its last job has ended")
    return None


def _end_without_token(observed: ObservedState) -> VmEnd | None:
    """Return the end of a VM whose script ended without a token: not the image's fault."""
    return _token_refused(observed) if observed.exit is not None and observed.refused else None


def _token_refused(observed: ObservedState) -> VmEnd:
    message = f"it got no token for the pool: {observed.refused}"
    return VmEnd(ClusterVmCode.TOKEN_REFUSED, message)


def _end_by_deadline(record: ClusterVmRecord) -> VmEnd | None:
    if record.phase is Phase.BOOTING:
        message = f"the guest was not ready within {record.order.boot_seconds} s"
        return VmEnd(ClusterVmCode.BOOT_TIMED_OUT, message)
    if record.phase is Phase.DRAINING:
        message = f"jobs still ran after {record.order.drain_seconds} s; they were ended"
        return VmEnd(ClusterVmCode.DRAIN_TIMED_OUT, message)
    return None


def _plan_running(record: ClusterVmRecord, observed: ObservedState, now: float) -> VmPlan:
    if record.phase is Phase.STAGING:
        return _staging(record, observed, now)
    effects: list[VmAction] = []
    if record.phase is Phase.RUNNING:
        record, effects = _running(record, now)
    if 0.0 < record.renew <= now:
        record = record.with_changes(renew=now + RENEW_AGAIN_SECONDS)
        effects.append(VmAction.RENEW)
    return VmPlan(record, tuple(effects), _next_time(record, observed))


def _staging(record: ClusterVmRecord, observed: ObservedState, now: float) -> VmPlan:
    if observed.working:
        return VmPlan(record)
    if observed.staged is None:  # the thread ended with an earlier agent
        return VmPlan(record, (VmAction.STAGE,))
    booting = _with_duration(record, now).enter(
        Phase.BOOTING, ClusterVmCode.PROGRESS, observed.unenforced, now
    )
    deadline = now + record.order.boot_seconds
    return VmPlan(
        booting.with_changes(hypervisor=observed.staged, deadline=deadline),
        (VmAction.BOOT,),
        until=deadline,
    )


def _with_duration(record: ClusterVmRecord, now: float) -> ClusterVmRecord:
    """Return the record with the duration of its phase added."""
    took = round(max(0.0, now - record.since), 3)
    return record.with_changes(seconds={**record.seconds, record.phase.value: took})


def _running(record: ClusterVmRecord, now: float) -> tuple[ClusterVmRecord, list[VmAction]]:
    order = record.order
    effects = []
    if record.deadline:
        record = record.with_changes(deadline=0.0)
    if order.admitted == record.incarnation and not record.admitted:
        record = record.with_changes(admitted=True, failures=0)
        effects.append(VmAction.TELL_ADMITTED)
    if order.goal is Goal.DRAIN:
        draining = record.enter(Phase.DRAINING, ClusterVmCode.PROGRESS, "it accepts no new jobs", now)
        record = draining.with_changes(deadline=now + order.drain_seconds)
        effects.append(VmAction.TELL_DRAIN)
    return record, effects


def _next_time(record: ClusterVmRecord, observed: ObservedState) -> float:
    times = [time for time in (record.deadline, record.renew) if time]
    if observed.exit is not None:
        times.append(observed.exit_at + POWER_OFF_SECONDS)
    return min(times, default=math.inf)
