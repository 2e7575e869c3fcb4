"""Failure backoff in the database: failures by image and node, and their history."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from repository.clusters.history import Told, record
from repository.clusters.tables import ClusterRow, GuardRow
from repository.images.sql import add_missing
from vmjobs.cluster.guard import Failure, Guard, GuardState
from vmjobs.cluster.member import MemberCode
from vmjobs.cluster.wire import ClusterGuard


def guard_of(row: GuardRow) -> Guard:
    """Convert a row for :mod:`vmjobs.cluster.failure_backoff`."""
    return Guard(
        image=row.image,
        node=row.node,
        failures=row.failures,
        closures=row.closures,
        until=row.until,
        code=MemberCode(row.code),
        why=row.why,
        nodes=tuple(row.nodes),
        proven=row.proven,
    )


def note_failures(session: Session, failed: Iterable[tuple[str, Failure]], present: datetime) -> None:
    """Count failures of VMs, each with the digest of its image."""
    failures = sorted(failed, key=lambda pair: (pair[0], pair[1].node))
    keys = sorted({key for image, f in failures for key in ((image, ""), (image, f.node))})
    add_missing(session, GuardRow, [_fresh(image, node) for image, node in keys])
    rows = {key: row for key, row in locked(session, {key[0] for key in keys}).items() if key in keys}
    for image, failure in failures:
        for node in ("", failure.node):
            if row := rows.get((image, node)):
                _put(row, guard_of(row).after_failure(failure, present))


def note_success(
    session: Session, rows: dict[tuple[str, str], GuardRow], image: str, node: str
) -> None:
    """Record that a VM of the image came up on a node. rows: all backoff rows, locked."""
    if (image, "") not in rows:
        rows[image, ""] = GuardRow(**_fresh(image, ""))
        session.add(rows[image, ""])
    for key in ((image, ""), (image, node)):
        if key in rows:
            _put(rows[key], guard_of(rows[key]).after_success())


def clear(session: Session, images: Collection[str]) -> None:
    """Clear the failures of these images."""
    for row in locked(session, images).values():
        _put(row, guard_of(row).cleared())


def locked(session: Session, images: Collection[str]) -> dict[tuple[str, str], GuardRow]:
    """Return the rows of these images, locked until the (write) transaction ends."""
    query = select(GuardRow).where(GuardRow.image.in_(sorted(images)))
    query = query.order_by(GuardRow.image, GuardRow.node).with_for_update()
    return {(row.image, row.node): row for row in session.scalars(query)}


def tell(
    session: Session,
    rows: Iterable[GuardRow],
    concerned: Mapping[str, Collection[ClusterRow]],
    present: datetime,
) -> None:
    """Record backoffs that began or ended in histories. concerned: locked clusters by image."""
    for row in rows:
        if row.told == row.until:
            continue
        state = "GUARD_CLOSED" if row.until else "GUARD_OPEN"
        told = Told(state, MemberCode.GUARDED.value, guard_of(row).sentence(present))
        for cluster in concerned.get(row.image, ()):
            record(session, cluster, told, present)
        row.told = row.until


def guard_views(
    rows: Iterable[GuardRow], images: Collection[str], present: datetime
) -> list[ClusterGuard]:
    """Convert the active backoffs of these images for operators."""
    found = []
    for guard in sorted((guard_of(row) for row in rows), key=lambda guard: (guard.image, guard.node)):
        state = guard.state(present)
        if guard.image in images and state is not GuardState.OPEN:
            found.append(
                ClusterGuard(
                    image=guard.image,
                    node=guard.node,
                    state=state,
                    failures=guard.failures,
                    code=guard.code,
                    message=guard.sentence(present),
                    until=guard.until,
                )
            )
    return found


def _fresh(image: str, node: str) -> dict[str, object]:
    return {**_columns(Guard(image, node)), "told": None}


def _columns(guard: Guard) -> dict[str, object]:
    return {**asdict(guard), "code": guard.code.value, "nodes": list(guard.nodes)}


def _put(row: GuardRow, guard: Guard) -> None:
    for name, value in _columns(guard).items():
        setattr(row, name, value)
