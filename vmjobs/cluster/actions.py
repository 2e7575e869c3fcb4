"""What a plan for clusters may say is to be done. Members go by their id."""

from __future__ import annotations

from dataclasses import dataclass

from vmjobs.cluster.member import Goal, MemberCode
from vmjobs.cluster.placement import Placement


@dataclass(frozen=True)
class Create:
    """Make a member, of the present generation, on a node or without one."""

    cluster: str
    name: str
    place: Placement


@dataclass(frozen=True)
class Place:
    """Give a member a node."""

    member: str
    node: str


@dataclass(frozen=True)
class SetPending:
    """Say why a member has no node."""

    member: str
    code: MemberCode
    why: str


@dataclass(frozen=True)
class SetGoal:
    """Let a member's machine end: with its last job, or now."""

    member: str
    goal: Goal


@dataclass(frozen=True)
class Admit:
    """Jobs may come to this machine."""

    member: str
    incarnation: int


@dataclass(frozen=True)
class Condemn:
    """This machine is to end, and another one to take its place."""

    member: str
    incarnation: int
    code: MemberCode
    why: str


@dataclass(frozen=True)
class Withdraw:
    """Have the pool forget a machine that is no more: jobs would be sent to it."""

    member: str


@dataclass(frozen=True)
class Forget:
    """The member is no more; its pool is to forget it first."""

    member: str


@dataclass(frozen=True)
class Stall:
    """Say that the replacement of machines does not go on."""

    cluster: str
    why: str


@dataclass(frozen=True)
class Keep:
    """All machines are up, and of the present generation: remember what it was."""

    cluster: str


@dataclass(frozen=True)
class RollBack:
    """Go back to the last generation that was fully up."""

    cluster: str
    why: str


@dataclass(frozen=True)
class Remove:
    """The cluster has no members any more, and was to go."""

    cluster: str


Action = (
    Create
    | Place
    | SetPending
    | SetGoal
    | Admit
    | Condemn
    | Withdraw
    | Forget
    | Stall
    | Keep
    | RollBack
    | Remove
)
