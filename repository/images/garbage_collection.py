"""Garbage collection of images, safe beside all other operations.

Rows are deleted in short transactions: candidates are locked (rows locked by others wait for the next
run), checked again under the lock, and deleted. A transaction that adds a reference to a row locks it,
too, so no reference appears in between. Objects are deleted after the commit; kill -9 in between leaves
objects without a row, which are swept by their age.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, delete, func, select
from sqlalchemy.orm import Session

from repository.db.database import Database
from repository.db.sql import batches
from repository.images.access import is_unexpired
from repository.images.checkpoints import DELETE_BATCH, delete_silent_jobs
from repository.images.segments import FOLDER
from repository.images.tables import (
    CheckpointContentRow,
    ContentRow,
    ContentSegmentRow,
    HoldingRow,
    ImageContentRow,
    ImageRow,
    SegmentRow,
    UploadContentRow,
    UploadRow,
    UploadSegmentRow,
)
from repository.images.usage import is_needed, is_unheld
from repository.storage.blob_owners import LIST_BATCH, BlobOwners
from repository.storage.objects import ORPHAN_SECONDS, ObjectInfo, ObjectStore
from vmjobs.config import Config
from vmjobs.model import now as utc_now
from vmjobs.wire import GcReport

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(rf"{FOLDER}/[0-9a-f]{{2}}/[0-9a-f]{{2}}/([0-9a-f]{{64}})\.[0-9a-f]+")


@dataclass(frozen=True)
class DeletionResult:
    """The result of one transaction.

    objects: keys that no row names any more; size: their bytes. more: rows may be left to delete.
    """

    count: int = 0
    size: int = 0
    objects: tuple[str, ...] = ()
    more: bool = False


DeletionStep = Callable[[Session, datetime], DeletionResult]


@dataclass(frozen=True)
class GarbageCollector:
    """Removes data that no image, job or upload needs any more."""

    database: Database
    objects: ObjectStore
    blob_owners: BlobOwners
    config: Config
    orphan_seconds: float = ORPHAN_SECONDS

    def collect(self, dry_run: bool = False) -> GcReport:
        """Remove expired images, abandoned uploads, silent jobs, and data that only they referenced.

        dry_run: remove nothing, report what would be removed.
        """
        if not dry_run:
            delete_silent_jobs(self.database, self.config)
        totals = self._count_steps() if dry_run else {step: self._run_step(step) for step in STEPS}
        uploads, images, contents, segments = (totals[step] for step in STEPS)
        count, size = self._sweep(dry_run)
        if not dry_run:
            self.objects.clean()
        blobs = self.blob_owners.collect(dry_run)
        report = GcReport(
            images=images.count,
            contents=contents.count,
            segments=segments.count + count,
            blobs=len(blobs),
            bytes=segments.size + size + sum(info.size for info in blobs),
            uploads=uploads.count,
        )
        logger.info("garbage collection%s: %s", " (dry run)" if dry_run else "", report)
        return report

    def _run_step(self, step: DeletionStep) -> DeletionResult:
        """Repeat a step until it finds no more rows."""
        parts: list[DeletionResult] = []
        while not parts or parts[-1].more:
            with self.database.write() as session:
                parts.append(step(session, utc_now() - timedelta(seconds=self.config.upload_seconds)))
            for key in parts[-1].objects:
                self.objects.delete(key)
        return DeletionResult(sum(part.count for part in parts), sum(part.size for part in parts))

    def _count_steps(self) -> dict[DeletionStep, DeletionResult]:
        """Count what each step would delete, without any lock."""
        before = utc_now() - timedelta(seconds=self.config.upload_seconds)
        uploads = select(UploadRow.id).where(UploadRow.touched < before)
        images = _unneeded_images(utc_now())
        contents = select(ContentRow.id).where(*_idle_contents(before, images, uploads))
        segments = select(SegmentRow.id).where(*_idle_segments(before, contents, uploads))
        size = func.coalesce(func.sum(SegmentRow.stored), 0)
        with self.database.read() as session:
            found = [
                DeletionResult(session.scalar(select(func.count()).select_from(keys.subquery())) or 0)
                for keys in (uploads, images, contents, segments)
            ]
            stored = session.scalar(select(size).where(SegmentRow.id.in_(segments)))
        found[-1] = replace(found[-1], size=int(stored or 0))
        return dict(zip(STEPS, found, strict=True))

    def _sweep(self, dry_run: bool) -> tuple[int, int]:
        """Remove old objects that no row names; return their number and bytes."""
        before = utc_now() - timedelta(seconds=self.orphan_seconds)
        old = (info for info in self.objects.keys(FOLDER) if info.modified < before)
        count = size = 0
        for some in batches(old, LIST_BATCH):
            for info in self._orphans(some):
                if not dry_run:
                    self.objects.delete(info.key)
                count, size = count + 1, size + info.size
        return count, size

    def _orphans(self, found: Sequence[ObjectInfo]) -> Iterable[ObjectInfo]:
        digests = [bytes.fromhex(m[1]) for info in found if (m := _NAME.fullmatch(info.key))]
        with self.database.read() as session:
            query = select(SegmentRow.object).where(SegmentRow.digest.in_(digests))
            named = set(session.scalars(query))
        return [info for info in found if info.key not in named]


def _unneeded_images(present: datetime) -> Select[str]:
    alive_there = select(HoldingRow.id).where(
        HoldingRow.image == ImageRow.digest, is_unexpired(present)
    )
    return select(ImageRow.digest).where(~alive_there.exists(), ~is_needed())


_Idle = tuple[ColumnElement[bool], ...]
#: A referencing table: its column of parts, its column of owners, and owners that do not count.
_Owners = tuple[Any, Any, Select[Any] | None]


def _idle_contents(
    before: datetime, images: Select[str] | None = None, uploads: Select[str] | None = None
) -> _Idle:
    """Conditions: contents without an image, upload or checkpoint, apart from these."""
    return _idle(
        ContentRow,
        before,
        (ImageContentRow.content, ImageContentRow.image, images),
        (UploadContentRow.content, UploadContentRow.upload, uploads),
        (CheckpointContentRow.content, CheckpointContentRow.job_id, None),
    )


def _idle_segments(
    before: datetime, contents: Select[int] | None = None, uploads: Select[str] | None = None
) -> _Idle:
    """Conditions: segments without a content or upload, apart from these."""
    return _idle(
        SegmentRow,
        before,
        (ContentSegmentRow.segment, ContentSegmentRow.content, contents),
        (UploadSegmentRow.segment, UploadSegmentRow.upload, uploads),
    )


def _idle(rows: type[ContentRow | SegmentRow], before: datetime, *owners: _Owners) -> _Idle:
    """Conditions: rows that were not touched since ``before`` and that no owner references."""
    return rows.touched < before, *(~_is_referenced(rows.id, *some) for some in owners)


def _is_referenced(key: Any, part: Any, owner: Any, but: Select[Any] | None) -> ColumnElement[bool]:
    query = select(part).where(part == key)
    return (query if but is None else query.where(owner.not_in(but))).exists()


def _delete_uploads(session: Session, before: datetime) -> DeletionResult:
    return _delete_idle(session, UploadRow, UploadRow.touched < before)


def _delete_images(session: Session, before: datetime) -> DeletionResult:
    """Delete images that no job needs and that have no holdings, or only expired ones."""
    del before
    present = utc_now()
    overdue = (
        select(HoldingRow.id)
        .where(HoldingRow.image == ImageRow.digest, ~is_unexpired(present))
        .exists()
    )
    digests = _lock_idle(session, ImageRow.digest, overdue | is_unheld(), ~is_needed())
    over = delete(HoldingRow).where(HoldingRow.image.in_(digests), ~is_unexpired(present))
    gone = session.execute(over.returning(HoldingRow.id)).all()
    dead = delete(ImageRow).where(ImageRow.digest.in_(digests), is_unheld(), ~is_needed())
    images = session.execute(dead.returning(ImageRow.digest)).all()
    return DeletionResult(len(images), more=bool(images or gone))


def _delete_contents(session: Session, before: datetime) -> DeletionResult:
    """Delete contents without an image, upload or checkpoint."""
    return _delete_idle(session, ContentRow, *_idle_contents(before))


def _delete_segments(session: Session, before: datetime) -> DeletionResult:
    """Delete segments without a content or upload, and their objects."""
    ids = _lock_idle(session, SegmentRow.id, *_idle_segments(before))
    dead = delete(SegmentRow).where(SegmentRow.id.in_(ids))
    rows = session.execute(dead.returning(SegmentRow.object, SegmentRow.stored)).all()
    size = sum(row.stored for row in rows)
    return DeletionResult(len(rows), size, tuple(row.object for row in rows), bool(rows))


STEPS: Final[tuple[DeletionStep, ...]] = (
    _delete_uploads,
    _delete_images,
    _delete_contents,
    _delete_segments,
)


def _delete_idle(
    session: Session, rows: type[UploadRow | ContentRow], *idle: ColumnElement[bool]
) -> DeletionResult:
    """Delete up to ``DELETE_BATCH`` idle rows."""
    ids = _lock_idle(session, rows.id, *idle)
    session.execute(delete(rows).where(rows.id.in_(ids)))
    return DeletionResult(len(ids), more=bool(ids))


def _lock_idle(session: Session, key: Any, *idle: ColumnElement[bool]) -> list[Any]:
    """Return keys of idle rows, locked until the transaction ends.

    It queries twice: another transaction may have referenced a row before it was locked.
    """
    query = select(key).where(*idle).order_by(key).limit(DELETE_BATCH).with_for_update(skip_locked=True)
    mine = list(session.scalars(query))
    return list(session.scalars(select(key).where(key.in_(mine), *idle))) if mine else []
