"""A member of a cluster: one machine on one node, and what three parties say about it.

The *goal* is the service's, the *phase* the word of the agent that runs the machine, and whether it is
in the pool is the collector's word. The state that people see is a pure function of the three.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Goal(StrEnum):
    """What is to become of a member. It only ever goes forward in this order.

    RUN: to be up, and started again whenever it ends. DRAIN: takes no new job, ends with its last one.
    STOP: ends now.
    """

    RUN = "run"
    DRAIN = "drain"
    STOP = "stop"


class Phase(StrEnum):
    """What its node's agent does with a member.

    WAITING: before another try. RUNNING: its guest is ready. GONE: no machine, verified, and none to
    come.
    """

    WAITING = "waiting"
    STAGING = "staging"
    BOOTING = "booting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    GONE = "gone"


class MemberState(StrEnum):
    """What people see.

    PENDING: no node has room. ASSIGNED: its node has not heard of it yet. JOINING: runs, not in the
    pool (yet). PROBING: in the pool; a probe job is to show that it works. UP: it ran, and jobs may
    come. BACKOFF: it failed; another try follows. LOST: its node has not been heard of.
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


class MemberCode(StrEnum):
    """Why a member is where it is. Stable: clients may compare with these."""

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


#: What a member is whose machine runs and is to go on running: by (in the pool, admitted).
_WANTED: Final = {
    (False, False): MemberState.JOINING,
    (False, True): MemberState.JOINING,
    (True, False): MemberState.PROBING,
    (True, True): MemberState.UP,
}
_GOING: Final = {Goal.DRAIN: MemberState.DRAINING, Goal.STOP: MemberState.STOPPING}
#: The others say it all by themselves.
_BY_PHASE: Final = {
    None: MemberState.ASSIGNED,
    Phase.WAITING: MemberState.BACKOFF,
    Phase.STAGING: MemberState.STAGING,
    Phase.BOOTING: MemberState.BOOTING,
    Phase.DRAINING: MemberState.DRAINING,
    Phase.STOPPING: MemberState.STOPPING,
    Phase.GONE: MemberState.GONE,
}


def state_of(
    goal: Goal, phase: Phase | None, *, placed: bool, heard: bool, joined: bool, admitted: bool
) -> MemberState:
    """The state that people see.

    Args:
        goal: the service's.
        phase: the agent's last word, None before its first.
        placed: it has a node.
        heard: that node has been heard of of late.
        joined: its present machine's ad is in the pool.
        admitted: a probe job ran in that machine.
    """
    if phase is not Phase.GONE and not (placed and heard):
        return MemberState.LOST if placed else MemberState.PENDING
    if phase is not Phase.RUNNING:
        return _BY_PHASE[phase]
    return _GOING.get(goal) or _WANTED[joined, admitted]
