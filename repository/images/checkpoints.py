"""Checkpoints of jobs: contents like those of images, each of which belongs to one job.

A checkpoint is kept until the job ends or has a newer one. Only the job's own token may read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from images.content import ContentLayout
from repository.db.database import Database
from repository.db.models import CondorJobRow
from repository.db.sql import add_missing
from repository.images.quota import check_quota, stored_size
from repository.images.segments import SegmentStore
from repository.images.tables import (
    CheckpointContentRow,
    CheckpointRow,
    ContentRow,
    ContentSegmentRow,
    SegmentRow,
    UploadContentRow,
    UploadRow,
)
from repository.storage.objects import ObjectReader
from vmjobs.config import Config
from vmjobs.errors import InvalidRequest, MissingChunks, NotFound
from vmjobs.model import Checkpoint
from vmjobs.model import now as utc_now

#: Rows deleted in one transaction: few enough not to delay others.
DELETE_BATCH: Final = 200
#: Runs that fail to resume from a checkpoint before the job starts over.
MAX_FAILURES: Final = 2


@dataclass(frozen=True)
class Checkpoints:
    """Reads checkpoints of jobs."""

    database: Database
    segments: SegmentStore

    def layout(self, job: str, content: str) -> bytes:
        """Return the layout of a file of a job's checkpoint.  Raises NotFound, DigestMismatch."""
        query = (
            select(ContentRow.layout)
            .join(CheckpointContentRow, CheckpointContentRow.content == ContentRow.id)
            .where(CheckpointContentRow.job_id == job, ContentRow.digest == content)
        )
        with self.database.read() as session:
            data = session.scalars(query).one_or_none()
        if data is None:
            raise NotFound(f"the checkpoint of job {job} has no content {content[:80]}")
        ContentLayout.parse(data, content)
        return data

    def open_segment(self, job: str, segment: bytes) -> ObjectReader:
        """Open a segment of a job's checkpoint, as it is stored; the reader has to verify it."""
        wanted = (
            select(ContentSegmentRow.segment)
            .join(CheckpointContentRow, CheckpointContentRow.content == ContentSegmentRow.content)
            .join(SegmentRow, SegmentRow.id == ContentSegmentRow.segment)
            .where(CheckpointContentRow.job_id == job, SegmentRow.digest == segment)
        )
        with self.database.read() as session:
            found = session.scalars(wanted.limit(1)).one_or_none()
        if found is None:
            raise NotFound(f"the checkpoint of job {job} has no segment {segment.hex()[:80]}")
        return self.segments.open(segment)


def keep_checkpoint(
    session: Session, config: Config, job: str, owner: str, upload: str, checkpoint: Checkpoint
) -> None:
    """Store a checkpoint from an upload of the job, in place of the previous one.

    Raises:
        MissingChunks: a file was not uploaded, or is deleted. InvalidRequest: a size is wrong.
        QuotaExceeded: beyond the owner's quota.
    """
    contents = _lock_contents(session, job, upload, checkpoint)
    stored = stored_size(session, contents)
    delete_checkpoint(session, job)
    session.add(
        CheckpointRow(
            job_id=job,
            owner=owner,
            created=utc_now(),
            stored=stored,
            document=checkpoint.model_dump(mode="json"),
        )
    )
    session.flush()
    rows = [{"job_id": job, "content": content} for content in sorted(contents)]
    add_missing(session, CheckpointContentRow, rows)
    session.execute(delete(UploadRow).where(UploadRow.job_id == job))
    check_quota(session, config, owner)


def delete_silent_jobs(database: Database, config: Config) -> None:
    """Delete transparent jobs that no node has reported for too long, with their checkpoints."""
    before = utc_now() - timedelta(seconds=config.checkpoint_seconds)
    silent = select(CondorJobRow.id).where(CondorJobRow.heard < before).limit(DELETE_BATCH)
    while True:
        with database.write() as session:
            gone = list(session.scalars(silent.with_for_update(skip_locked=True)))
            for job in gone:
                delete_checkpoint(session, job)
            session.execute(delete(CondorJobRow).where(CondorJobRow.id.in_(gone)))
        if not gone:
            return


def checkpoint_of(session: Session, job: str) -> Checkpoint | None:
    row = session.get(CheckpointRow, job)
    return Checkpoint.model_validate(row.document) if row is not None else None


def delete_checkpoint(session: Session, job: str) -> None:
    """Delete a job's checkpoint; the next garbage collection removes its data."""
    session.execute(delete(CheckpointRow).where(CheckpointRow.job_id == job))


def record_resume_failure(session: Session, job: str) -> None:
    """Count a failure to resume: the first may be a node's fault, the second deletes it."""
    row = session.get(CheckpointRow, job)
    if row is None:
        return
    row.failures += 1
    if row.failures >= MAX_FAILURES:
        delete_checkpoint(session, job)


def _lock_contents(session: Session, job: str, upload: str, checkpoint: Checkpoint) -> set[int]:
    """Return the ids of the checkpoint's contents, locked until the transaction ends."""
    found = set()
    for file in checkpoint.files:
        if file.digest is None:
            continue
        query = (
            select(ContentRow)
            .join(UploadContentRow, UploadContentRow.content == ContentRow.id)
            .join(UploadRow, UploadRow.id == UploadContentRow.upload)
            .where(ContentRow.digest == file.digest, UploadRow.id == upload, UploadRow.job_id == job)
            .with_for_update(read=True, key_share=True, of=ContentRow)
        )
        row = session.scalars(query).one_or_none()
        if row is None:
            raise MissingChunks(
                f"the content {file.digest} of {file.name} was not uploaded, or is deleted by now",
                hint="upload it, and repeat the request",
            )
        if row.size != file.size:
            raise InvalidRequest(f"{file.name} has {row.size} bytes, not {file.size}")
        found.add(row.id)
    return found
