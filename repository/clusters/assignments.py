"""Assignments of cluster VMs to nodes, as agents read them, and the agents' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import select, update
from sqlalchemy.orm import Session, undefer

from repository.clusters.backoff import record_failures
from repository.clusters.core import console_of
from repository.clusters.history import storable_text, update_state
from repository.clusters.tables import AssignmentRow, ClusterRow, ClusterVmRow
from repository.db.database import Database
from repository.db.ids import is_id
from repository.db.sql import add_missing, upsert
from repository.jobs.streams import StreamStore
from vmjobs.cluster.failure_backoff import VmFailures
from vmjobs.cluster.vm_state import ClusterVmCode, Goal, Phase
from vmjobs.cluster.wire import Assignment, ClusterVmOrder, ClusterVmReport, ClusterVmReports
from vmjobs.errors import Forbidden
from vmjobs.model import StreamName
from vmjobs.model import now as utc_now

#: The time of an agent's last contact is updated at most this often.
HEARD_INTERVAL: Final = timedelta(seconds=10)


@dataclass(frozen=True)
class ClusterAssignments:
    """Assignments of VMs to nodes, for agents. ``node``: the agent's node, from its token."""

    database: Database
    streams: StreamStore

    def get(self, node: str) -> Assignment:
        """Return all VMs assigned to a node. The call counts as contact with its agent."""
        self._record_contact(node)
        query = select(ClusterVmRow).where(ClusterVmRow.node == node).order_by(ClusterVmRow.id)
        with self.database.read() as session:
            # Before the VMs: if they change in between, the agent asks again.
            counted = select(AssignmentRow.revision).where(AssignmentRow.node == node)
            revision = session.scalar(counted) or 0
            rows = session.scalars(query.options(undefer(ClusterVmRow.orders)))
            return Assignment(revision=revision, members=tuple(order_of(row) for row in rows))

    def revisions(self, nodes: Sequence[str]) -> dict[str, int]:
        """Return the revisions of these nodes' assignments, with one query."""
        query = select(AssignmentRow.node, AssignmentRow.revision).where(AssignmentRow.node.in_(nodes))
        with self.database.read() as session:
            return {row.node: row.revision for row in session.execute(query)}

    def store_reports(self, node: str, batch: ClusterVmReports) -> None:
        """Store a node's reports. Repeating the call is no error.

        Reports of VMs that the node does not have are ignored: its agent reads its assignment.
        """
        self._record_contact(node)
        by_id = {report.id: report for report in batch.reports}
        with self.database.read() as session:
            rows = session.scalars(select(ClusterVmRow).where(ClusterVmRow.node == node)).all()
            news = [
                row for row in rows if _has_changes(row, _effective_report(row, by_id, batch.complete))
            ]
        if not news:
            return
        clusters = sorted({row.cluster for row in news})
        ids = sorted(row.id for row in news)
        present = utc_now()
        with self.database.write() as session:
            # The reconciler locks in the same order.
            known = select(ClusterRow).where(ClusterRow.name.in_(clusters)).order_by(ClusterRow.name)
            of = {row.name: row for row in session.scalars(known.with_for_update())}
            failed: list[tuple[str, VmFailures]] = []
            mine = select(ClusterVmRow).where(ClusterVmRow.id.in_(ids), ClusterVmRow.node == node)
            for row in session.scalars(mine.order_by(ClusterVmRow.id).with_for_update()):
                reported = _effective_report(row, by_id, batch.complete)
                if reported is not None and _has_changes(row, reported) and row.cluster in of:
                    if failure := _new_failures(row, reported):
                        failed.append((row.image, failure))
                    _apply_report(row, reported, present)
                    update_state(session, of[row.cluster], row, True, present)
            if failed:
                record_failures(session, failed, present)

    def order_for(self, node: str, vm: str, incarnation: int) -> ClusterVmOrder:
        """Return the order of a cluster VM whose incarnation may have a token.

        Raises Forbidden: the VM is not on this node, has to stop, or is not at that incarnation.
        """
        row = self._require_vm(node, vm)
        if row.goal == Goal.STOP.value or row.phase == Phase.GONE.value:
            raise Forbidden(f"the VM {vm} has to stop")
        if not max(1, row.incarnation) <= incarnation <= row.incarnation + 1:
            raise Forbidden(f"the VM {vm} is at incarnation {row.incarnation}, not {incarnation}")
        if incarnation <= row.condemned:
            raise Forbidden(f"incarnation {incarnation} of the VM {vm} has to end")
        return order_of(row)

    def count_token(self, node: str, *, given: bool) -> None:
        """Count a request of a node's agent for a VM's token as granted or refused."""
        add = (
            {"tokens": AssignmentRow.tokens + 1} if given else {"refusals": AssignmentRow.refusals + 1}
        )
        with self.database.write() as session:
            add_missing(session, AssignmentRow, [{"node": node}])
            session.execute(update(AssignmentRow).where(AssignmentRow.node == node).values(add))

    def append_console(self, node: str, vm: str, incarnation: int, offset: int, data: bytes) -> None:
        """Append to the console of a VM; the consoles of its last two incarnations are kept.

        Raises Forbidden, Conflict: ``offset`` is beyond the end.
        """
        row = self._require_vm(node, vm)
        if not max(1, row.incarnation - 1) <= incarnation <= row.incarnation + 1:
            raise Forbidden(f"the VM {vm} is at incarnation {row.incarnation}, not {incarnation}")
        if offset == 0 and incarnation > 2:
            self.streams.drop(row.id, console_of(incarnation - 2))
        self.streams.append(row.id, console_of(incarnation), StreamName.CONSOLE, offset, data)

    def _require_vm(self, node: str, vm: str) -> ClusterVmRow:
        with self.database.read() as session:
            options = [undefer(ClusterVmRow.orders)]
            row = session.get(ClusterVmRow, vm, options=options) if is_id(vm) else None
        if row is None or row.node != node:
            raise Forbidden(f"the node {node} has no VM {vm[:64]}")
        return row

    def _record_contact(self, node: str) -> None:
        present = utc_now()
        with self.database.read() as session:
            heard = session.scalar(select(AssignmentRow.heard).where(AssignmentRow.node == node))
        if heard is not None and present - heard < HEARD_INTERVAL:
            return
        with self.database.write() as session:
            row = {"node": node, "heard": present}
            upsert(session, AssignmentRow, row, key=("node",), change=("heard",))


def bump_revision(session: Session, node: str) -> None:
    """Increment the revision of a node's assignment, which changes with this transaction."""
    add_missing(session, AssignmentRow, [{"node": node}])
    found = update(AssignmentRow).where(AssignmentRow.node == node)
    session.execute(found.values(revision=AssignmentRow.revision + 1))


def order_of(row: ClusterVmRow) -> ClusterVmOrder:
    """Return the order of a cluster VM for its node."""
    changing = {
        "goal": row.goal,
        "admitted": row.admitted,
        "condemned": row.condemned,
        "why": row.why,
        "why_message": row.why_message,
    }
    return ClusterVmOrder.model_validate({**row.orders, **changing})


def _effective_report(
    row: ClusterVmRow, reports: Mapping[str, ClusterVmReport], complete: bool
) -> ClusterVmReport | None:
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
    return ClusterVmReport(
        id=row.id,
        incarnation=row.incarnation,
        phase=Phase.GONE,
        code=ClusterVmCode.NODE_FAILED,
        message=f"the node {row.node} does not know the VM any more",
        since=utc_now(),
    )


def _has_changes(row: ClusterVmRow, reported: ClusterVmReport | None) -> bool:
    if reported is None:
        return False
    kept = (row.phase, row.incarnation, row.code, row.message, row.failures, row.retry, row.hypervisor)
    return kept != (
        reported.phase.value,
        reported.incarnation,
        reported.code.value,
        storable_text(reported.message),
        reported.failures,
        _retry_time(reported),
        reported.hypervisor.value if reported.hypervisor else None,
    )


def _new_failures(row: ClusterVmRow, reported: ClusterVmReport) -> VmFailures | None:
    """Return the failures that are new in a report, if any."""
    known = row.phase == Phase.WAITING.value and row.incarnation == reported.incarnation
    if reported.phase is not Phase.WAITING or known or not reported.failures:
        return None
    count = max(1, reported.failures - row.failures)
    return VmFailures(row.node, reported.code, storable_text(reported.message), count)


def _apply_report(row: ClusterVmRow, reported: ClusterVmReport, present: datetime) -> None:
    if (row.phase, row.incarnation) != (reported.phase.value, reported.incarnation):
        row.waiting = present if reported.phase is Phase.RUNNING else None
        row.busy = row.busy and reported.incarnation == row.incarnation
    row.phase, row.incarnation = reported.phase.value, reported.incarnation
    row.code, row.message = reported.code.value, storable_text(reported.message)
    row.failures, row.retry = reported.failures, _retry_time(reported)
    row.hypervisor = reported.hypervisor.value if reported.hypervisor else None


def _retry_time(reported: ClusterVmReport) -> datetime | None:
    """Return when the agent retries; a time without a time zone is UTC."""
    if reported.retry is None or reported.retry.tzinfo is not None:
        return reported.retry
    return reported.retry.replace(tzinfo=UTC)
