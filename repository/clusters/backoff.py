"""Failure backoff in the database: failures by image and node, and their history."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from repository.clusters.history import HistoryEntry, record
from repository.clusters.tables import BackoffRow, ClusterRow
from repository.db.sql import add_missing
from repository.db.views import view_of
from vmjobs.cluster.failure_backoff import BackoffState, FailureBackoff, VmFailures
from vmjobs.cluster.vm_state import ClusterVmCode
from vmjobs.cluster.wire import ClusterBackoff


def backoff_of(row: BackoffRow) -> FailureBackoff:
    """Convert a row for :mod:`vmjobs.cluster.failure_backoff`."""
    return FailureBackoff(
        image=row.image,
        node=row.node,
        failures=row.failures,
        closures=row.closures,
        until=row.until,
        code=ClusterVmCode(row.code),
        why=row.why,
        nodes=tuple(row.nodes),
        proven=row.proven,
    )


def record_failures(
    session: Session, failed: Iterable[tuple[str, VmFailures]], present: datetime
) -> None:
    """Count failures of VMs, each with the digest of its image."""
    failures = sorted(failed, key=lambda pair: (pair[0], pair[1].node))
    keys = sorted({key for image, f in failures for key in ((image, ""), (image, f.node))})
    add_missing(session, BackoffRow, [_new_columns(image, node) for image, node in keys])
    rows = lock_backoffs(session, {image for image, _ in keys})
    for image, failure in failures:
        for node in ("", failure.node):
            if row := rows.get((image, node)):
                _update_row(row, backoff_of(row).after_failure(failure, present))


def record_success(
    session: Session, rows: dict[tuple[str, str], BackoffRow], image: str, node: str
) -> None:
    """Record that a VM of the image came up on a node. rows: all backoff rows, locked."""
    if (image, "") not in rows:
        rows[image, ""] = BackoffRow(**_new_columns(image, ""))
        session.add(rows[image, ""])
    for key in ((image, ""), (image, node)):
        if key in rows:
            _update_row(rows[key], backoff_of(rows[key]).after_success())


def clear(session: Session, images: Collection[str]) -> None:
    """Clear the failures of these images."""
    for row in lock_backoffs(session, images).values():
        _update_row(row, backoff_of(row).reset())


def lock_backoffs(session: Session, images: Collection[str]) -> dict[tuple[str, str], BackoffRow]:
    """Return the rows of these images, locked until the (write) transaction ends."""
    query = select(BackoffRow).where(BackoffRow.image.in_(sorted(images)))
    query = query.order_by(BackoffRow.image, BackoffRow.node).with_for_update()
    return {(row.image, row.node): row for row in session.scalars(query)}


def record_changes(
    session: Session,
    rows: Iterable[BackoffRow],
    concerned: Mapping[str, Collection[ClusterRow]],
    present: datetime,
) -> None:
    """Record backoffs that began or ended in histories. concerned: locked clusters by image."""
    for row in rows:
        if row.told == row.until:
            continue
        state = "GUARD_CLOSED" if row.until else "GUARD_OPEN"
        entry = HistoryEntry(state, ClusterVmCode.GUARDED.value, backoff_of(row).describe(present))
        for cluster in concerned.get(row.image, ()):
            record(session, cluster, entry, present)
        row.told = row.until


def backoff_views(
    rows: Iterable[BackoffRow], images: Collection[str], present: datetime
) -> list[ClusterBackoff]:
    """Convert the active backoffs of these images for operators."""
    found = []
    for guard in sorted((backoff_of(row) for row in rows), key=lambda guard: (guard.image, guard.node)):
        state = guard.state(present)
        if guard.image in images and state is not BackoffState.OPEN:
            found.append(view_of(ClusterBackoff, guard, state=state, message=guard.describe(present)))
    return found


def _new_columns(image: str, node: str) -> dict[str, object]:
    return {**_columns(FailureBackoff(image, node)), "told": None}


def _columns(guard: FailureBackoff) -> dict[str, object]:
    return {**asdict(guard), "code": guard.code.value, "nodes": list(guard.nodes)}


def _update_row(row: BackoffRow, guard: FailureBackoff) -> None:
    for name, value in _columns(guard).items():
        setattr(row, name, value)
