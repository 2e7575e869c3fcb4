"""What happens to clusters and members, one line each; and the state that goes with it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

from sqlalchemy import delete
from sqlalchemy.orm import Session

from repository.clusters.tables import ClusterEventRow, ClusterRow, MemberRow
from vmjobs.cluster.member import Goal, MemberCode, MemberState, Phase, state_of

#: Lines of a cluster's history that are kept.
KEPT: Final = 1000
#: Older ones are deleted so many at a time.
_AT_ONCE: Final = 100
MAX_MESSAGE: Final = 8192
_SAID: Final = {
    MemberState.ASSIGNED: "its node is to start it",
    MemberState.JOINING: "its machine runs and is not in the pool",
    MemberState.PROBING: "its machine is in the pool; a probe job is to run in it",
    MemberState.UP: "a probe job ran in its machine: jobs may come",
}


class Happened(StrEnum):
    """What happens to a cluster itself: states of its own lines."""

    CREATED = "CREATED"
    CHANGED = "CHANGED"
    SCALED = "SCALED"
    DRAINING = "DRAINING"
    RESUMED = "RESUMED"
    RETRIED = "RETRIED"
    DELETING = "DELETING"
    STALLED = "STALLED"
    ROLLED_BACK = "ROLLED_BACK"
    GUARD_CLOSED = "GUARD_CLOSED"
    GUARD_OPEN = "GUARD_OPEN"


class Told(NamedTuple):
    """What a line says."""

    state: str
    code: str = MemberCode.PROGRESS.value
    message: str = ""


def record(
    session: Session,
    cluster: ClusterRow,
    told: Told,
    present: datetime,
    member: MemberRow | None = None,
) -> None:
    """Add a line to the history of a locked cluster; the oldest ones go, sooner or later."""
    cluster.events_count += 1
    if member is None:
        _count(cluster, f"cluster.{told.state}")
    session.add(
        ClusterEventRow(
            cluster=cluster.name,
            seq=cluster.events_count,
            time=present,
            member=member.name if member else "",
            node=member.node if member else "",
            state=told.state,
            code=told.code,
            message=told.message[:MAX_MESSAGE],
        )
    )
    if cluster.events_count > KEPT and cluster.events_count % _AT_ONCE == 0:
        old = ClusterEventRow.seq <= cluster.events_count - KEPT
        session.execute(
            delete(ClusterEventRow).where(ClusterEventRow.cluster == cluster.name, old),
            execution_options={"synchronize_session": False},
        )


def happened(cluster: ClusterRow, what: Happened) -> int:
    """How often it did."""
    return int((cluster.happened or {}).get(f"cluster.{what}", 0))


def came_to(cluster: ClusterRow, state: MemberState) -> int:
    """How often members of the cluster came to be in a state; those that are gone, too."""
    return int((cluster.happened or {}).get(f"member.{state}", 0))


def enter(
    session: Session, cluster: ClusterRow, member: MemberRow, told: Told, present: datetime
) -> None:
    """A member of a locked cluster comes to be in a state: counted, and told."""
    _count(cluster, f"member.{told.state}")
    record(session, cluster, told, present, member)


def _count(cluster: ClusterRow, key: str) -> None:
    known = cluster.happened or {}
    cluster.happened = {**known, key: known.get(key, 0) + 1}


def present_state(row: MemberRow, heard: bool) -> MemberState:
    """A member's state. heard: its node has been heard of of late."""
    lives = row.incarnation > 0
    return state_of(
        Goal(row.goal),
        Phase(row.phase) if row.phase else None,
        placed=bool(row.node),
        heard=heard,
        joined=lives and row.advertised == row.incarnation,
        admitted=lives and row.admitted == row.incarnation,
    )


def reason_of(row: MemberRow, state: MemberState) -> tuple[str, str]:
    """Code and sentence for a member that is in this state."""
    if state is MemberState.LOST:
        return MemberCode.NODE_LOST.value, f"its node {row.node} has not been heard of lately"
    if state in _SAID:
        # An agent adds to that what a machine which runs is not held to.
        added = row.message if row.phase == Phase.RUNNING.value else ""
        return MemberCode.PROGRESS.value, "; ".join(filter(None, (_SAID[state], added)))
    return row.code, row.message


def follow(
    session: Session, cluster: ClusterRow, row: MemberRow, heard: bool, present: datetime
) -> None:
    """Note the state of a member of a locked cluster, and that it changed, if it did."""
    state = present_state(row, heard)
    if row.state == state.value:
        return
    row.state, row.since = state.value, present
    row.up_since = present if state is MemberState.UP else None
    enter(session, cluster, row, Told(state.value, *reason_of(row, state)), present)


def tellable(text: str) -> str:
    """Text that both databases keep: PostgreSQL takes no NUL, and a guest's words may have one."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")
