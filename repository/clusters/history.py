"""The history of clusters and their VMs, one line for each event; and the states of VMs."""

from __future__ import annotations

from datetime import datetime
from typing import Final, NamedTuple

from sqlalchemy import delete
from sqlalchemy.orm import Session

from repository.clusters.tables import ClusterEventRow, ClusterRow, ClusterVmRow
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Goal, Phase, state_of

#: Lines kept of a cluster's history.
MAX_EVENTS: Final = 1000
#: Older lines are deleted in batches of this size.
_PRUNE_BATCH: Final = 100
MAX_MESSAGE: Final = 8192
#: Events of a cluster itself: the ``state`` of its own history lines.
CLUSTER_EVENTS: Final = (
    *("CREATED", "CHANGED", "SCALED", "DRAINING", "RESUMED", "RETRIED", "DELETING"),
    *("STALLED", "ROLLED_BACK", "GUARD_CLOSED", "GUARD_OPEN"),
)
_STATE_MESSAGES: Final = {
    ClusterVmState.ASSIGNED: "the node has to start the VM",
    ClusterVmState.JOINING: "the VM runs and is not in the pool yet",
    ClusterVmState.PROBING: "the VM is in the pool; a probe job has to run in it",
    ClusterVmState.UP: "a probe job ran in the VM; it accepts jobs",
}


class HistoryEntry(NamedTuple):
    """State, code and message of one history line."""

    state: str
    code: str = ClusterVmCode.PROGRESS.value
    message: str = ""


def record(
    session: Session,
    cluster: ClusterRow,
    entry: HistoryEntry,
    present: datetime,
    vm: ClusterVmRow | None = None,
) -> None:
    """Add a line to the history of a locked cluster, and prune lines beyond ``MAX_EVENTS``."""
    cluster.events_count += 1
    if vm is None:
        _count(cluster, f"cluster.{entry.state}")
    session.add(
        ClusterEventRow(
            cluster=cluster.name,
            seq=cluster.events_count,
            time=present,
            member=vm.name if vm else "",
            node=vm.node if vm else "",
            state=entry.state,
            code=entry.code,
            message=entry.message[:MAX_MESSAGE],
        )
    )
    if cluster.events_count > MAX_EVENTS and cluster.events_count % _PRUNE_BATCH == 0:
        old = ClusterEventRow.seq <= cluster.events_count - MAX_EVENTS
        session.execute(
            delete(ClusterEventRow).where(ClusterEventRow.cluster == cluster.name, old),
            execution_options={"synchronize_session": False},
        )


def event_count(cluster: ClusterRow, what: str) -> int:
    """Return how often an event happened to the cluster."""
    return int((cluster.happened or {}).get(f"cluster.{what}", 0))


def state_entry_count(cluster: ClusterRow, state: ClusterVmState) -> int:
    """Return how often VMs of the cluster, including deleted ones, entered a state."""
    return int((cluster.happened or {}).get(f"member.{state}", 0))


def record_state_entry(
    session: Session, cluster: ClusterRow, vm: ClusterVmRow, entry: HistoryEntry, present: datetime
) -> None:
    """Count and record that a VM of a locked cluster enters a state."""
    _count(cluster, f"member.{entry.state}")
    record(session, cluster, entry, present, vm)


def _count(cluster: ClusterRow, key: str) -> None:
    known = cluster.happened or {}
    cluster.happened = {**known, key: known.get(key, 0) + 1}


def present_state(row: ClusterVmRow, heard: bool) -> ClusterVmState:
    """Return the state of a cluster VM. heard: its node is alive."""
    lives = row.incarnation > 0
    return state_of(
        Goal(row.goal),
        Phase(row.phase) if row.phase else None,
        placed=bool(row.node),
        heard=heard,
        joined=lives and row.advertised == row.incarnation,
        admitted=lives and row.admitted == row.incarnation,
    )


def reason_of(row: ClusterVmRow, state: ClusterVmState) -> tuple[str, str]:
    """Return code and message for a VM in this state."""
    if state is ClusterVmState.LOST:
        return ClusterVmCode.NODE_LOST.value, f"the node {row.node} has not reported lately"
    if state in _STATE_MESSAGES:
        # For a running VM, the agent reports limits that it cannot enforce.
        added = row.message if row.phase == Phase.RUNNING.value else ""
        return ClusterVmCode.PROGRESS.value, "; ".join(filter(None, (_STATE_MESSAGES[state], added)))
    return row.code, row.message


def update_state(
    session: Session, cluster: ClusterRow, row: ClusterVmRow, heard: bool, present: datetime
) -> None:
    """Update the state of a VM of a locked cluster; a change adds a line to the history."""
    state = present_state(row, heard)
    if row.state == state.value:
        return
    row.state, row.since = state.value, present
    row.up_since = present if state is ClusterVmState.UP else None
    record_state_entry(
        session, cluster, row, HistoryEntry(state.value, *reason_of(row, state)), present
    )


def storable_text(text: str) -> str:
    """Replace NULs, which PostgreSQL refuses and a guest's message may contain."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")
