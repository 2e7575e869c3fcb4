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

from vmjobs.agent.members.record import LONGEST_MESSAGE, End, Facts, Record
from vmjobs.cluster.member import Goal, MemberCode, Phase
from vmjobs.cluster.wire import MemberOrder
from vmjobs.model import ExitStatus

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 300.0
#: Seconds for a guest to power off after its script has ended.
POWER_OFF_SECONDS = 15.0
#: Seconds between attempts to renew a token.
RENEW_AGAIN_SECONDS = 30.0
#: Minimum seconds until the next incarnation after the service has refused a token.
REFUSED_PAUSE = 30.0
#: Seconds between attempts to destroy a VM.
DESTROY_AGAIN_SECONDS = 10.0

ADMIT = signal.SIGUSR1
NEW_TOKEN = signal.SIGUSR2
DRAIN = signal.SIGTERM


class Effect(Enum):
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
class Decision:
    """The next record, the actions, and the time of the next planning (seconds since 1970)."""

    record: Record
    effects: tuple[Effect, ...] = ()
    until: float = math.inf


def pause_after(failures: int) -> float:
    """Return seconds between two incarnations after so many failures in a row."""
    if failures == 0:
        return 0.0
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 30))


def decide(order: MemberOrder | None, record: Record, facts: Facts, now: float) -> Decision:
    """Plan the next actions for a cluster VM.

    order: None: the assignment of this node no longer contains it.
    """
    if order is not None and order != record.order:
        record = record.but(order=order)
    if facts.renewed:
        record = record.but(renew=facts.renewed)
    wanted = order is not None
    if facts.destroyed:
        return _destroyed(record, now, wanted=wanted)
    if record.phase in {Phase.WAITING, Phase.GONE}:
        return _without_machine(record, now, wanted=wanted, again=facts.again)
    if record.phase is Phase.STOPPING:
        return _stopping(record, facts, now)
    if record.phase is Phase.BOOTING and facts.ready:
        # Keep the message: it lists the limits that are not enforced.
        record = _timed(record, now).enter(Phase.RUNNING, MemberCode.PROGRESS, record.message, now)
    end = _ordered_end(record, facts, wanted=wanted) or _seen_end(record, facts, now)
    if end is None:
        return _go_on(record, facts, now)
    return Decision(record, (Effect.ABORT,)) if facts.working else _stop(record, end, now)


# --------------------------------------------------------------------------- without a VM


def _without_machine(record: Record, now: float, *, wanted: bool, again: bool) -> Decision:
    if not wanted:
        return Decision(record, (Effect.FORGET,))
    if record.phase is Phase.GONE and not (again and record.order.goal is Goal.RUN):
        return Decision(record)
    if record.order.goal is not Goal.RUN:
        return Decision(_gone(record, now))
    if record.phase is Phase.GONE:
        record = record.but(failures=0)
    # Never wait longer than the longest pause, even if the clock was set back.
    if now < record.retry <= now + LONGEST_PAUSE:
        return Decision(record, until=record.retry)
    # After a loss of records, continue with numbers that the service has not seen yet.
    last = max(record.incarnation, record.order.admitted, record.order.condemned)
    fresh = record.enter(Phase.STAGING, MemberCode.PROGRESS, "", now).but(
        incarnation=last + 1,
        failing=False,
        retry=0.0,
        deadline=0.0,
        renew=0.0,
        hypervisor=None,
        admitted=False,
        seconds={},
    )
    return Decision(fresh, (Effect.STAGE,))


def _gone(record: Record, now: float) -> Record:
    """Return the record in the phase GONE; keep the reason that ended a drained VM."""
    code, message = record.code, record.message
    if record.order.goal is Goal.STOP:
        code, message = MemberCode.STOPPED, "stopped"
    elif record.phase is Phase.WAITING:
        code, message = MemberCode.DRAINED, "it had no VM"
    return record.enter(Phase.GONE, code, message, now).but(retry=0.0, machine="")


def _destroyed(record: Record, now: float, *, wanted: bool) -> Decision:
    if not wanted:
        return Decision(record, (Effect.FORGET,))
    if record.order.goal is not Goal.RUN:
        return Decision(_gone(record, now))
    failures = record.failures + record.failing
    # A refused token is no failure of the VM: it only causes a pause.
    pause = REFUSED_PAUSE if record.code is MemberCode.TOKEN_REFUSED else 0.0
    retry = now + max(pause_after(failures), pause)
    waiting = record.enter(Phase.WAITING, record.code, record.message, now)
    return Decision(
        waiting.but(failures=failures, failing=False, retry=retry, machine="", token="", sentinel=""),
        until=retry,
    )


# --------------------------------------------------------------------------- with a VM


def _stop(record: Record, end: End, now: float) -> Decision:
    condemned = record.order.condemned >= record.incarnation
    refused = end.code is MemberCode.TOKEN_REFUSED
    failing = not refused and (condemned or not record.admitted)
    stopping = record.enter(Phase.STOPPING, end.code, end.message, now)
    stopping = stopping.but(failing=failing, retry=0.0, deadline=0.0, undestroyed="")
    return Decision(stopping, (Effect.DESTROY,))


def _stopping(record: Record, facts: Facts, now: float) -> Decision:
    if facts.undestroyed:
        record = record.but(undestroyed=facts.undestroyed[:LONGEST_MESSAGE])
    if facts.working:
        return Decision(record)
    if now < record.retry <= now + LONGEST_PAUSE:
        return Decision(record, until=record.retry)
    return Decision(record.but(retry=now + DESTROY_AGAIN_SECONDS), (Effect.DESTROY,))


def _ordered_end(record: Record, facts: Facts, *, wanted: bool) -> End | None:
    """Return why the service orders the VM's end now, if it does."""
    order = record.order
    if not wanted:
        return End(code=MemberCode.STOPPED, message="the service has removed it from this node")
    if order.goal is Goal.STOP:
        return End(code=MemberCode.STOPPED, message="stopped")
    if order.goal is Goal.DRAIN and record.phase in {Phase.STAGING, Phase.BOOTING}:
        return End(code=MemberCode.DRAINED, message="it had not started to run jobs")
    if order.condemned >= record.incarnation:
        # Without a token it could not join the pool: the refusal is the cause of the timeout.
        late = order.why is MemberCode.JOIN_TIMED_OUT and facts.refused and not record.admitted
        return _untokened(facts) if late else End(code=order.why, message=order.why_message)
    return None


def _seen_end(record: Record, facts: Facts, now: float) -> End | None:
    """Return why the VM must be destroyed now: it ended, or exceeded a deadline."""
    if facts.end is not None:
        return _drained(record, facts) or _refused(facts) or facts.end
    if facts.exit is not None and now >= facts.exit_at + POWER_OFF_SECONDS:
        last = End(code=MemberCode.GUEST_ENDED, message=ended(facts.exit))
        return _drained(record, facts) or _refused(facts) or last
    if record.deadline == 0.0 or now < record.deadline:
        return None
    return _overdue(record)


def _drained(record: Record, facts: Facts) -> End | None:
    if record.phase is Phase.DRAINING and facts.exit is not None and facts.exit.ok:
        return End(code=MemberCode.DRAINED, message="its last job has ended")
    return None


def _refused(facts: Facts) -> End | None:
    """Return the end of a VM whose script ended without a token: not the image's fault."""
    return _untokened(facts) if facts.exit is not None and facts.refused else None


def _untokened(facts: Facts) -> End:
    message = f"it got no token for the pool: {facts.refused}"
    return End(code=MemberCode.TOKEN_REFUSED, message=message)


def ended(exit: ExitStatus) -> str:
    """Return a sentence that says how the guest's script ended."""
    if exit.signal is not None:
        return f"the guest's script was killed by signal {exit.signal}"
    return f"the guest's script ended with status {exit.code}"


def _overdue(record: Record) -> End | None:
    if record.phase is Phase.BOOTING:
        message = f"the guest was not ready within {record.order.boot_seconds} s"
        return End(code=MemberCode.BOOT_TIMED_OUT, message=message)
    if record.phase is Phase.DRAINING:
        message = f"jobs still ran after {record.order.drain_seconds} s; they were ended"
        return End(code=MemberCode.DRAIN_TIMED_OUT, message=message)
    return None


def _go_on(record: Record, facts: Facts, now: float) -> Decision:
    if record.phase is Phase.STAGING:
        return _staging(record, facts, now)
    effects: list[Effect] = []
    if record.phase is Phase.RUNNING:
        record, effects = _running(record, now)
    if 0.0 < record.renew <= now:
        record = record.but(renew=now + RENEW_AGAIN_SECONDS)
        effects.append(Effect.RENEW)
    return Decision(record, tuple(effects), _next_look(record, facts))


def _staging(record: Record, facts: Facts, now: float) -> Decision:
    if facts.working:
        return Decision(record)
    if facts.staged is None:  # the thread ended with an earlier agent
        return Decision(record, (Effect.STAGE,))
    booting = _timed(record, now).enter(Phase.BOOTING, MemberCode.PROGRESS, facts.unenforced, now)
    deadline = now + record.order.boot_seconds
    return Decision(
        booting.but(hypervisor=facts.staged, deadline=deadline), (Effect.BOOT,), until=deadline
    )


def _timed(record: Record, now: float) -> Record:
    """Return the record with the duration of its phase added."""
    took = round(max(0.0, now - record.since), 3)
    return record.but(seconds={**record.seconds, record.phase.value: took})


def _running(record: Record, now: float) -> tuple[Record, list[Effect]]:
    order = record.order
    effects = []
    if record.deadline:
        record = record.but(deadline=0.0)
    if order.admitted == record.incarnation and not record.admitted:
        record = record.but(admitted=True, failures=0)
        effects.append(Effect.TELL_ADMITTED)
    if order.goal is Goal.DRAIN:
        draining = record.enter(Phase.DRAINING, MemberCode.PROGRESS, "it accepts no new jobs", now)
        record = draining.but(deadline=now + order.drain_seconds)
        effects.append(Effect.TELL_DRAIN)
    return record, effects


def _next_look(record: Record, facts: Facts) -> float:
    times = [time for time in (record.deadline, record.renew) if time]
    if facts.exit is not None:
        times.append(facts.exit_at + POWER_OFF_SECONDS)
    return min(times, default=math.inf)
