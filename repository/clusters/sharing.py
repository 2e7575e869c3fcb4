"""Assignments of cluster VMs to nodes, as agents read them, and the agents' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import select, update
from sqlalchemy.orm import Session, undefer

from repository.clusters.core import ClusterCore, console_of
from repository.clusters.guarding import note_failures
from repository.clusters.history import follow, tellable
from repository.clusters.tables import ClusterRow, MemberRow, NodeShareRow
from repository.ids import is_id
from repository.images.sql import add_missing
from vmjobs.cluster.guard import Failure
from vmjobs.cluster.member import Goal, MemberCode, Phase
from vmjobs.cluster.wire import MemberOrder, MemberReport, MemberReports, NodeShare
from vmjobs.errors import Forbidden
from vmjobs.model import StreamName
from vmjobs.model import now as utc_now

#: The time of an agent's last contact is updated at most this often.
HEARD_EVERY: Final = timedelta(seconds=10)


class Sharing(ClusterCore):
    """The part that agents call. ``node``: the agent's node, from its token."""

    def share(self, node: str) -> NodeShare:
        """Return all VMs assigned to a node. The call counts as contact with its agent."""
        self._touch(node)
        query = select(MemberRow).where(MemberRow.node == node).order_by(MemberRow.id)
        with self.database.read() as session:
            # Before the VMs: if they change in between, the agent asks again.
            counted = select(NodeShareRow.revision).where(NodeShareRow.node == node)
            revision = session.scalar(counted) or 0
            rows = session.scalars(query.options(undefer(MemberRow.orders)))
            return NodeShare(revision=revision, members=tuple(order_of(row) for row in rows))

    def revisions(self, nodes: Sequence[str]) -> dict[str, int]:
        """Return the revisions of these nodes' assignments, with one query."""
        query = select(NodeShareRow.node, NodeShareRow.revision).where(NodeShareRow.node.in_(nodes))
        with self.database.read() as session:
            return {row.node: row.revision for row in session.execute(query)}

    def take_reports(self, node: str, told: MemberReports) -> None:
        """Store a node's reports. Repeating the call is no error.

        Reports of VMs that the node does not have are ignored: its agent reads its assignment.
        """
        self._touch(node)
        by_id = {report.id: report for report in told.reports}
        with self.database.read() as session:
            rows = session.scalars(select(MemberRow).where(MemberRow.node == node)).all()
            news = [row for row in rows if _differs(row, _said(row, by_id, told.complete))]
        if not news:
            return
        clusters = sorted({row.cluster for row in news})
        ids = sorted(row.id for row in news)
        present = utc_now()
        with self.database.write() as session:
            # The reconciler locks in the same order.
            known = select(ClusterRow).where(ClusterRow.name.in_(clusters)).order_by(ClusterRow.name)
            of = {row.name: row for row in session.scalars(known.with_for_update())}
            failed: list[tuple[str, Failure]] = []
            mine = select(MemberRow).where(MemberRow.id.in_(ids), MemberRow.node == node)
            for row in session.scalars(mine.order_by(MemberRow.id).with_for_update()):
                said = _said(row, by_id, told.complete)
                if said is not None and _differs(row, said) and row.cluster in of:
                    if failure := _failure(row, said):
                        failed.append((row.image, failure))
                    _take(row, said, present)
                    follow(session, of[row.cluster], row, True, present)
            if failed:
                note_failures(session, failed, present)

    def order_for(self, node: str, member: str, incarnation: int) -> MemberOrder:
        """Return the order of a cluster VM whose incarnation may have a token.

        Raises Forbidden: the VM is not on this node, has to stop, or is not at that incarnation.
        """
        row = self._mine(node, member)
        if row.goal == Goal.STOP.value or row.phase == Phase.GONE.value:
            raise Forbidden(f"the VM {member} has to stop")
        if not max(1, row.incarnation) <= incarnation <= row.incarnation + 1:
            raise Forbidden(f"the VM {member} is at incarnation {row.incarnation}, not {incarnation}")
        if incarnation <= row.condemned:
            raise Forbidden(f"incarnation {incarnation} of the VM {member} has to end")
        return order_of(row)

    def count_token(self, node: str, *, given: bool) -> None:
        """Count a request of a node's agent for a VM's token as granted or refused."""
        add = {"tokens": NodeShareRow.tokens + 1} if given else {"refusals": NodeShareRow.refusals + 1}
        with self.database.write() as session:
            add_missing(session, NodeShareRow, [_fresh_share(node)])
            session.execute(update(NodeShareRow).where(NodeShareRow.node == node).values(add))

    def append_console(
        self, node: str, member: str, incarnation: int, offset: int, data: bytes
    ) -> None:
        """Append to the console of a VM; the consoles of its last two incarnations are kept.

        Raises Forbidden, Conflict: ``offset`` is beyond the end.
        """
        row = self._mine(node, member)
        if not max(1, row.incarnation - 1) <= incarnation <= row.incarnation + 1:
            raise Forbidden(f"the VM {member} is at incarnation {row.incarnation}, not {incarnation}")
        if offset == 0 and incarnation > 2:
            self.streams.drop(row.id, console_of(incarnation - 2))
        self.streams.append(row.id, console_of(incarnation), StreamName.CONSOLE, offset, data)

    def _mine(self, node: str, member: str) -> MemberRow:
        with self.database.read() as session:
            options = [undefer(MemberRow.orders)]
            row = session.get(MemberRow, member, options=options) if is_id(member) else None
        if row is None or row.node != node:
            raise Forbidden(f"the node {node} has no VM {member[:64]}")
        return row

    def _touch(self, node: str) -> None:
        """Record contact with the node's agent."""
        present = utc_now()
        with self.database.read() as session:
            heard = session.scalar(select(NodeShareRow.heard).where(NodeShareRow.node == node))
        if heard is not None and present - heard < HEARD_EVERY:
            return
        with self.database.write() as session:
            add_missing(session, NodeShareRow, [_fresh_share(node, present)])
            found = update(NodeShareRow).where(NodeShareRow.node == node)
            session.execute(found.values(heard=present))


def bump(session: Session, node: str) -> None:
    """Increment the revision of a node's assignment, which changes with this transaction."""
    add_missing(session, NodeShareRow, [_fresh_share(node)])
    found = update(NodeShareRow).where(NodeShareRow.node == node)
    session.execute(found.values(revision=NodeShareRow.revision + 1))


def _fresh_share(node: str, heard: datetime | None = None) -> dict[str, object]:
    return {"node": node, "revision": 0, "heard": heard, "tokens": 0, "refusals": 0}


def order_of(row: MemberRow) -> MemberOrder:
    """Return the order of a cluster VM for its node."""
    changing = {
        "goal": row.goal,
        "admitted": row.admitted,
        "condemned": row.condemned,
        "why": row.why,
        "why_message": row.why_message,
    }
    return MemberOrder.model_validate({**row.orders, **changing})


def _said(row: MemberRow, reports: Mapping[str, MemberReport], complete: bool) -> MemberReport | None:
    """Return the report to apply to a cluster VM; None: there is none."""
    report = reports.get(row.id)
    if row.phase == Phase.GONE.value:
        return None
    known = row.incarnation if row.phase else -1
    if report is not None and report.incarnation >= known:
        return report
    # Not reported yet, or an outdated report; with a complete report, the node has lost the VM.
    if not complete or known < 0:
        return None
    return MemberReport(
        id=row.id,
        incarnation=row.incarnation,
        phase=Phase.GONE,
        code=MemberCode.NODE_FAILED,
        message=f"the node {row.node} does not know the VM any more",
        since=utc_now(),
    )


def _differs(row: MemberRow, said: MemberReport | None) -> bool:
    if said is None:
        return False
    kept = (row.phase, row.incarnation, row.code, row.message, row.failures, row.retry, row.hypervisor)
    return kept != (
        said.phase.value,
        said.incarnation,
        said.code.value,
        tellable(said.message),
        said.failures,
        _retry(said),
        said.hypervisor.value if said.hypervisor else None,
    )


def _failure(row: MemberRow, said: MemberReport) -> Failure | None:
    """Return the failures that are new in a report, if any."""
    known = row.phase == Phase.WAITING.value and row.incarnation == said.incarnation
    if said.phase is not Phase.WAITING or known or not said.failures:
        return None
    count = max(1, said.failures - row.failures)
    return Failure(row.node, said.code, tellable(said.message), count)


def _take(row: MemberRow, said: MemberReport, present: datetime) -> None:
    if (row.phase, row.incarnation) != (said.phase.value, said.incarnation):
        row.waiting = present if said.phase is Phase.RUNNING else None
        row.busy = row.busy and said.incarnation == row.incarnation
    row.phase, row.incarnation = said.phase.value, said.incarnation
    row.code, row.message = said.code.value, tellable(said.message)
    row.failures, row.retry = said.failures, _retry(said)
    row.hypervisor = said.hypervisor.value if said.hypervisor else None


def _retry(said: MemberReport) -> datetime | None:
    """Return when the agent retries; a time without a time zone is UTC."""
    if said.retry is None or said.retry.tzinfo is not None:
        return said.retry
    return said.retry.replace(tzinfo=UTC)
