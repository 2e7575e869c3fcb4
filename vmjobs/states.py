"""Job states, the table of their transitions, and reason codes.

The program beside each job of a node imports this, so it imports only the standard library's ``enum``.
"""

from __future__ import annotations

from enum import StrEnum

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Final


class Actor(StrEnum):
    """Who must act on a failure."""

    USER = "user"
    SITE = "site"
    SERVICE = "service"


class JobState(StrEnum):
    """The state of a job. ``BOOTING`` ends when the guest reports that it is ready."""

    QUEUED = "QUEUED"
    STAGING = "STAGING"
    BOOTING = "BOOTING"
    RUNNING = "RUNNING"
    COLLECTING = "COLLECTING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    HELD = "HELD"
    SUSPENDED = "SUSPENDED"
    CANCELING = "CANCELING"
    CANCELED = "CANCELED"
    PREEMPTED = "PREEMPTED"

    @property
    def final(self) -> bool:
        return not TRANSITIONS[self]


_S = JobState
_EARLY_ENDS: Final = frozenset({_S.FAILED, _S.CANCELING, _S.PREEMPTED, _S.HELD})

#: The states that may follow each state. A canceled job is ``CANCELING`` until its VM is known to be
#: gone; until then it may still finish by itself.
TRANSITIONS: Final[Mapping[JobState, frozenset[JobState]]] = {
    _S.QUEUED: frozenset({_S.STAGING, _S.HELD, _S.CANCELING, _S.FAILED}),
    _S.STAGING: _EARLY_ENDS | {_S.BOOTING},
    _S.BOOTING: _EARLY_ENDS | {_S.RUNNING},
    _S.RUNNING: _EARLY_ENDS | {_S.COLLECTING, _S.SUSPENDED},
    _S.COLLECTING: _EARLY_ENDS | {_S.COMPLETED},
    _S.SUSPENDED: _EARLY_ENDS | {_S.RUNNING},
    _S.HELD: frozenset({_S.QUEUED, _S.CANCELING, _S.FAILED}),
    _S.PREEMPTED: frozenset({_S.QUEUED, _S.CANCELING, _S.FAILED}),
    _S.CANCELING: frozenset({_S.CANCELED, _S.COMPLETED, _S.FAILED}),
    _S.COMPLETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELED: frozenset(),
}

#: States in which an execute node is at work on the job.
ON_NODE_STATES: Final = frozenset({_S.STAGING, _S.BOOTING, _S.RUNNING, _S.SUSPENDED, _S.COLLECTING})


class ReasonCode(StrEnum):
    """Why a job is in its state. Stable: clients may compare with these codes."""

    SUBMITTED = "SUBMITTED"
    SCHEDULED = "SCHEDULED"
    PROGRESS = "PROGRESS"
    SUCCEEDED = "SUCCEEDED"
    SCRIPT_FAILED = "SCRIPT_FAILED"
    SCRIPT_KILLED = "SCRIPT_KILLED"
    OUTPUT_MISSING = "OUTPUT_MISSING"
    OUTPUT_TOO_LARGE = "OUTPUT_TOO_LARGE"
    NO_EXIT_REPORT = "NO_EXIT_REPORT"
    KERNEL_PANIC = "KERNEL_PANIC"
    BOOT_FAILED = "BOOT_FAILED"
    BOOT_TIMED_OUT = "BOOT_TIMED_OUT"
    TIMED_OUT = "TIMED_OUT"
    CONSOLE_FLOODED = "CONSOLE_FLOODED"
    GUEST_LOST = "GUEST_LOST"
    IMAGE_REJECTED = "IMAGE_REJECTED"
    IMAGE_UNAVAILABLE = "IMAGE_UNAVAILABLE"
    INPUT_UNAVAILABLE = "INPUT_UNAVAILABLE"
    NO_HYPERVISOR = "NO_HYPERVISOR"
    NODE_FAILED = "NODE_FAILED"
    AGENT_RESTARTED = "AGENT_RESTARTED"
    SCHEDULER_UNAVAILABLE = "SCHEDULER_UNAVAILABLE"
    SCHEDULER_HELD = "SCHEDULER_HELD"
    SCHEDULER_REMOVED = "SCHEDULER_REMOVED"
    SCHEDULER_LOST = "SCHEDULER_LOST"
    RELEASED = "RELEASED"
    EVICTED = "EVICTED"
    CHECKPOINTED = "CHECKPOINTED"
    NOT_RESUMED = "NOT_RESUMED"
    USER_CANCELED = "USER_CANCELED"
    USER_HELD = "USER_HELD"
    INTERNAL = "INTERNAL"


_SITE_CODES: Final = frozenset(
    {
        ReasonCode.NO_HYPERVISOR,
        ReasonCode.NODE_FAILED,
        ReasonCode.AGENT_RESTARTED,
        ReasonCode.EVICTED,
        ReasonCode.CHECKPOINTED,
        ReasonCode.NOT_RESUMED,
        ReasonCode.GUEST_LOST,
        ReasonCode.BOOT_FAILED,
        ReasonCode.BOOT_TIMED_OUT,
    }
)
_SERVICE_CODES: Final = frozenset(
    {
        ReasonCode.IMAGE_UNAVAILABLE,
        ReasonCode.INPUT_UNAVAILABLE,
        ReasonCode.SCHEDULER_UNAVAILABLE,
        ReasonCode.SCHEDULER_HELD,
        ReasonCode.SCHEDULER_REMOVED,
        ReasonCode.SCHEDULER_LOST,
        ReasonCode.INTERNAL,
    }
)

#: Failures for which the job may succeed on another node, and that its user cannot fix.
RETRYABLE: Final = frozenset(
    {
        ReasonCode.NODE_FAILED,
        ReasonCode.NO_HYPERVISOR,
        ReasonCode.IMAGE_UNAVAILABLE,
        ReasonCode.INPUT_UNAVAILABLE,
        ReasonCode.INTERNAL,
    }
)
#: Reasons to requeue a job that must not run on the same node again.
REQUEUE_REASONS: Final = RETRYABLE | {ReasonCode.NOT_RESUMED}
#: Maximum number of attempts at a job that fails for reasons in :data:`RETRYABLE`.
MAX_ATTEMPTS: Final = 5


def actor_for(code: ReasonCode) -> Actor:
    """Who must act on a job that ended with ``code``."""
    if code in _SITE_CODES:
        return Actor.SITE
    return Actor.SERVICE if code in _SERVICE_CODES else Actor.USER
