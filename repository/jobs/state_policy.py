"""Derives state changes from observations of the scheduler: a pure function with a table.

The agent's reports move a job while a node works on it. The scheduler's observations count where the
agent cannot report: held, released, evicted, removed, lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from vmjobs.batch import BatchStatus, Observation
from vmjobs.model import ON_NODE_STATES, RETRYABLE, JobState, Reason, ReasonCode, reason

#: How long the agent's final report may still arrive after the batch job ended.
REPORT_GRACE: Final = timedelta(seconds=30)
#: How long the node may take to report that its VM is gone after the batch job was removed.
CANCEL_GRACE: Final = timedelta(seconds=60)
#: A schedd that forwards jobs reports late. An idle job that was never seen running there counts as
#: evicted only once its agent has been silent for this long.
AGENT_SILENCE: Final = timedelta(seconds=180)
#: A job that the schedd does not know fails after this long.
LOST_AFTER: Final = timedelta(seconds=300)

#: Statuses in which nothing of the job is left at the scheduler.
ABSENT_STATUSES: Final = frozenset({BatchStatus.REMOVED, BatchStatus.COMPLETED, BatchStatus.MISSING})


@dataclass(frozen=True)
class StateChange:
    """One state change to make."""

    state: JobState
    reason: Reason


@dataclass(frozen=True)
class RecordedJob:
    """The repository's data about a job.

    code: the reason it is in ``state``.
    claimed: an agent has claimed it.  ended: that agent reported that its VM is gone.
    ending: how the job had ended by itself by then, while it was being canceled.
    heard: time of that agent's last contact.
    seen_running: the scheduler reported the job as running after the claim.
    since: since when the scheduler reports its present status.
    """

    state: JobState
    code: ReasonCode
    since: datetime
    claimed: bool = False
    ended: bool = False
    ending: StateChange | None = None
    heard: datetime | None = None
    seen_running: bool = False


_S, _B = JobState, BatchStatus
_QUEUED, _HELD, _PREEMPTED, _CANCELING = _S.QUEUED, _S.HELD, _S.PREEMPTED, _S.CANCELING


def is_silent(facts: RecordedJob, now: datetime, span: timedelta) -> bool:
    """Whether no agent had contact for ``span``."""
    return facts.heard is None or now - facts.heard >= span


def _keep(facts: RecordedJob, seen: Observation, now: datetime) -> list[StateChange]:
    del facts, seen, now
    return []


def _requeue(facts: RecordedJob, seen: Observation, now: datetime) -> list[StateChange]:
    del now
    if facts.ended and seen.status is not _B.IDLE:
        return []  # the observation is older than the agent's report; if not, a claim corrects it
    return [StateChange(_QUEUED, reason(ReasonCode.SCHEDULED, "waiting for a node again"))]


def _release(facts: RecordedJob, seen: Observation, now: datetime) -> list[StateChange]:
    del facts, seen, now
    return [StateChange(_QUEUED, reason(ReasonCode.RELEASED, "the hold was released"))]


def _evict(facts: RecordedJob, seen: Observation, now: datetime) -> list[StateChange]:
    del seen
    if not (facts.seen_running or facts.ended or is_silent(facts, now, AGENT_SILENCE)):
        return []
    why = "the scheduler took the job off its node; it waits for another"
    return [
        StateChange(_PREEMPTED, reason(ReasonCode.EVICTED, why)),
        StateChange(_QUEUED, reason(ReasonCode.EVICTED, why)),
    ]


def _hold(facts: RecordedJob, seen: Observation, now: datetime) -> list[StateChange]:
    del now
    held = StateChange(_HELD, reason(ReasonCode.SCHEDULER_HELD, seen.reason or "no reason was given"))
    if facts.state is _PREEMPTED:
        return [StateChange(_QUEUED, reason(ReasonCode.SCHEDULED, "taken off its node")), held]
    return [held]


def _cancel(facts: RecordedJob, seen: Observation, now: datetime) -> list[StateChange]:
    """Cancel a job that left the scheduler; CANCELED also needs a node's report or a time-out.

    A job may end by itself before the cancel reaches it: the scheduler decides whether it did, so that
    both record the same end.
    """
    if facts.ending is not None and seen.status is _B.COMPLETED:
        return [facts.ending]
    steps = []
    code = facts.code
    if facts.state is not _CANCELING:
        code = ReasonCode.SCHEDULER_REMOVED
        why = seen.reason or "the job was removed at the scheduler"
        steps.append(StateChange(_CANCELING, reason(code, why)))
    if not facts.claimed:
        steps.append(StateChange(_S.CANCELED, reason(code, "canceled before a node took it")))
    elif facts.ended:
        steps.append(StateChange(_S.CANCELED, reason(code, "canceled; the virtual machine is gone")))
    elif now - facts.since >= CANCEL_GRACE:
        why = "canceled; the node did not confirm that the virtual machine is gone"
        steps.append(StateChange(_S.CANCELED, reason(code, why)))
    return steps


def _end(facts: RecordedJob, seen: Observation, now: datetime) -> list[StateChange]:
    if now - facts.since < REPORT_GRACE:
        return []
    how = "ended"
    if seen.exit_signal is not None:
        how = f"was killed by signal {seen.exit_signal}"
    elif seen.exit_code is not None:
        how = f"ended with code {seen.exit_code}"
    if not facts.claimed:
        return [
            StateChange(
                _S.FAILED,
                reason(ReasonCode.NODE_FAILED, f"the batch job {how} before any agent took the job"),
            )
        ]
    code = ReasonCode.NO_EXIT_REPORT if seen.exit_code == 0 else ReasonCode.GUEST_LOST
    if facts.state is _PREEMPTED and facts.code in RETRYABLE:
        why = f"{facts.code}: nodes failed the job, and the scheduler does not try again"
        return [StateChange(_S.FAILED, reason(facts.code, why))]
    why = f"the batch job {how} while the job was {facts.state}; the node sent no exit report"
    return [StateChange(_S.FAILED, reason(code, why))]


def _fail_lost(facts: RecordedJob, seen: Observation, now: datetime) -> list[StateChange]:
    del seen
    if now - facts.since < LOST_AFTER or not is_silent(facts, now, AGENT_SILENCE):
        return []
    why = f"the schedd has not known the job for {int((now - facts.since).total_seconds())} s"
    return [StateChange(_S.FAILED, reason(ReasonCode.SCHEDULER_LOST, why))]


_Rule = Callable[[RecordedJob, Observation, datetime], list[StateChange]]


def _row(
    queued: _Rule, on_node: _Rule, held: _Rule, preempted: _Rule, canceling: _Rule
) -> dict[JobState, _Rule]:
    return {
        _QUEUED: queued,
        _HELD: held,
        _PREEMPTED: preempted,
        _CANCELING: canceling,
        **dict.fromkeys(ON_NODE_STATES, on_node),
    }


#: Rules by the scheduler's status and the job's state. Final states are in no row: they never change.
_TABLE: Final[Mapping[BatchStatus, Mapping[JobState, _Rule]]] = {
    # from QUEUED, from a node, from HELD, from PREEMPTED, from CANCELING
    _B.IDLE: _row(_keep, _evict, _release, _requeue, _keep),
    _B.RUNNING: _row(_keep, _keep, _release, _requeue, _keep),
    _B.SUSPENDED: _row(_keep, _keep, _release, _requeue, _keep),
    _B.HELD: _row(_hold, _hold, _keep, _hold, _keep),
    _B.REMOVED: _row(_cancel, _cancel, _cancel, _cancel, _cancel),
    _B.COMPLETED: _row(_end, _end, _end, _end, _cancel),
    _B.MISSING: _row(_fail_lost, _fail_lost, _fail_lost, _fail_lost, _cancel),
}


def decide(facts: RecordedJob, seen: Observation, now: datetime) -> list[StateChange]:
    """Return the state changes to make now, in order; none during a grace period."""
    rule = _TABLE[seen.status].get(facts.state, _keep)
    return rule(facts, seen, now)
