"""The state of a cluster VM: a pure function of the reports of three parties.

The service sets the *goal*, the agent that runs the VM reports the *phase*, and the collector shows
whether the VM is in the pool.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Goal(StrEnum):
    """The wanted state of a cluster VM. It only moves forward in this order.

    RUN: up, and restarted whenever it ends. DRAIN: accepts no new jobs, ends after its last one.
    STOP: ends now.
    """

    RUN = "run"
    DRAIN = "drain"
    STOP = "stop"


class Phase(StrEnum):
    """The phase of a cluster VM in its node's agent.

    WAITING: before another try. RUNNING: its guest is ready. GONE: verified gone, for good.
    """

    WAITING = "waiting"
    STAGING = "staging"
    BOOTING = "booting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    GONE = "gone"


class ClusterVmState(StrEnum):
    """The state of a cluster VM that users see.

    PENDING: no node has capacity. ASSIGNED: its node has not reported it yet. JOINING: runs, not in the
    pool (yet). PROBING: in the pool; waits for a probe job. UP: the probe job ran, it accepts jobs.
    BACKOFF: it failed; another try follows. LOST: its node has sent no heartbeat.
    """

    PENDING = "PENDING"
    ASSIGNED = "ASSIGNED"
    STAGING = "STAGING"
    BOOTING = "BOOTING"
    JOINING = "JOINING"
    PROBING = "PROBING"
    UP = "UP"
    BACKOFF = "BACKOFF"
    DRAINING = "DRAINING"
    STOPPING = "STOPPING"
    LOST = "LOST"
    GONE = "GONE"


class ClusterVmCode(StrEnum):
    """Reason codes of a cluster VM's state. Stable: clients may compare with them."""

    PROGRESS = "PROGRESS"
    NO_NODE = "NO_NODE"
    NO_ROOM = "NO_ROOM"
    GUARDED = "GUARDED"
    NODE_LOST = "NODE_LOST"
    IMAGE_UNAVAILABLE = "IMAGE_UNAVAILABLE"
    IMAGE_REJECTED = "IMAGE_REJECTED"
    NO_HYPERVISOR = "NO_HYPERVISOR"
    TOKEN_REFUSED = "TOKEN_REFUSED"  # noqa: S105  a code
    BOOT_FAILED = "BOOT_FAILED"
    BOOT_TIMED_OUT = "BOOT_TIMED_OUT"
    KERNEL_PANIC = "KERNEL_PANIC"
    GUEST_LOST = "GUEST_LOST"
    GUEST_ENDED = "GUEST_ENDED"
    JOIN_TIMED_OUT = "JOIN_TIMED_OUT"
    PROBE_FAILED = "PROBE_FAILED"
    DRAINED = "DRAINED"
    DRAIN_TIMED_OUT = "DRAIN_TIMED_OUT"
    STOPPED = "STOPPED"
    NODE_FAILED = "NODE_FAILED"
    INTERNAL = "INTERNAL"


_ENDING_STATES: Final = {Goal.DRAIN: ClusterVmState.DRAINING, Goal.STOP: ClusterVmState.STOPPING}
#: Phases that determine the state alone.
_BY_PHASE: Final = {
    None: ClusterVmState.ASSIGNED,
    Phase.WAITING: ClusterVmState.BACKOFF,
    Phase.STAGING: ClusterVmState.STAGING,
    Phase.BOOTING: ClusterVmState.BOOTING,
    Phase.DRAINING: ClusterVmState.DRAINING,
    Phase.STOPPING: ClusterVmState.STOPPING,
    Phase.GONE: ClusterVmState.GONE,
}


def state_of(
    goal: Goal, phase: Phase | None, *, placed: bool, heard: bool, joined: bool, admitted: bool
) -> ClusterVmState:
    """Return the state that users see.

    Args:
        goal: the service's.
        phase: of the agent's last report, None before its first.
        placed: it has a node.
        heard: that node has sent a recent heartbeat.
        joined: the ad of its present incarnation is in the pool.
        admitted: a probe job ran in that incarnation.
    """
    if phase is not Phase.GONE and not (placed and heard):
        return ClusterVmState.LOST if placed else ClusterVmState.PENDING
    if phase is not Phase.RUNNING:
        return _BY_PHASE[phase]
    if goal in _ENDING_STATES:
        return _ENDING_STATES[goal]
    if not joined:
        return ClusterVmState.JOINING
    return ClusterVmState.UP if admitted else ClusterVmState.PROBING
