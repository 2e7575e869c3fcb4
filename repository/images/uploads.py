"""Running uploads: queries for missing segments and chunks, and uploaded contents."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from images.content import SEGMENT_BYTES, ContentLayout, zero_chunk_digest, zero_segment_digest
from repository.db.database import Database
from repository.db.ids import is_id
from repository.db.sql import add_missing, batches, take_transaction_lock, upsert
from repository.images.access import is_own_upload, may_use_content, may_use_segment
from repository.images.permissions import Viewer
from repository.images.quota import check_quota
from repository.images.tables import (
    ChunkRow,
    ContentRow,
    ContentSegmentRow,
    SegmentRow,
    UploadContentRow,
    UploadRow,
    UploadSegmentRow,
)
from vmjobs.config import Config
from vmjobs.errors import (
    Conflict,
    InvalidRequest,
    MissingChunks,
    NotFound,
    PayloadTooLarge,
    Unavailable,
)
from vmjobs.model import MIB
from vmjobs.model import now as utc_now
from vmjobs.wire import MAX_DIGESTS, Upload

#: Attempts of a transaction that fails because a garbage collection deletes its rows.
TRIES = 3


@dataclass(frozen=True)
class Uploads:
    """Uploads of images. Every method raises NotFound for another viewer's upload."""

    database: Database
    config: Config

    def begin(self, viewer: Viewer, size: int) -> Upload:
        """Begin an upload of at most ``size`` bytes of content.

        Raises PayloadTooLarge (no image may be so large), QuotaExceeded (the quota is used up),
        Conflict (too many uploads are open).
        """
        # A disk, a kernel and an initial RAM disk, each of them within the limit.
        if size > 3 * self.config.max_image_size * MIB:
            raise PayloadTooLarge(
                f"an upload of {size} bytes: disks of more than {self.config.max_image_size} MiB "
                "are not taken here"
            )
        present = utc_now()
        with self.database.write() as session:
            check_quota(session, self.config, viewer.user, 1)
            if viewer.job:  # an unfinished upload of the job's earlier checkpoint is useless now
                session.execute(delete(UploadRow).where(UploadRow.job_id == viewer.job))
            else:
                _check_open_uploads(session, viewer.user, self.config.max_open_uploads)
            row = UploadRow(
                id=secrets.token_hex(16),
                owner=viewer.user,
                job_id=viewer.job,
                size=size,
                content=0,
                received=0,
                created=present,
                touched=present,
            )
            session.add(row)
            return self._view(row)

    def get(self, viewer: Viewer, upload: str) -> Upload:
        """Return the progress of an upload."""
        with self.database.read() as session:
            row = session.get(UploadRow, upload) if is_id(upload) else None
            if row is None or (row.owner, row.job_id) != (viewer.user, viewer.job):
                raise upload_not_found(upload)
            return self._view(row)

    def drop(self, viewer: Viewer, upload: str) -> None:
        """Drop an upload; the next garbage collection removes its unreferenced data."""
        with self.database.write() as session:
            mine = (UploadRow.id == upload, *is_own_upload(viewer))
            gone = session.execute(delete(UploadRow).where(*mine).returning(UploadRow.id)).all()
            if not gone:
                raise upload_not_found(upload)

    def missing_segments(self, viewer: Viewer, upload: str, digests: Sequence[bytes]) -> list[bool]:
        """Tell for each segment whether it must be sent.

        Segments that the viewer may use stay while the upload runs; those of others count as missing.
        """
        check_digests(digests)
        wanted = sorted(set(digests))
        for _ in range(TRIES):
            try:
                with self.database.write() as session:
                    here = lock_segments(session, viewer, wanted)
                    link_segments(session, upload, [row.id for row in here.values()])
                    record_use(session, viewer, upload)
                    return [
                        digest not in here and digest != zero_segment_digest() for digest in digests
                    ]
            except IntegrityError:  # the upload, or a segment, was deleted meanwhile
                self.get(viewer, upload)
        raise Unavailable("database", "segments were deleted meanwhile: ask again")

    def missing_chunks(self, viewer: Viewer, upload: str, digests: Sequence[bytes]) -> list[bool]:
        """Tell for each chunk whether it must be sent: those in no segment of the viewer.

        This is a hint: :meth:`SegmentStore.put` may still refuse a segment without the other chunks.
        """
        check_digests(digests)
        self._use(viewer, upload)
        with self.database.read() as session:
            here = {zero_chunk_digest()}
            for some in batches(sorted(set(digests))):
                here.update(known_chunks(session, viewer, some))
        return [digest not in here for digest in digests]

    def put_content(self, viewer: Viewer, upload: str, digest: str, layout: bytes) -> None:
        """Create a content of stored segments that the viewer may use.

        Raises:
            DigestMismatch: ``layout`` does not have the digest ``digest``.
            PayloadTooLarge: no image may be so large.
            InvalidRequest: a segment has the wrong size for its place.
            MissingChunks: segments are missing; the message says how many.
            QuotaExceeded: beyond the owner's quota.
        """
        parts = ContentLayout.parse(layout, digest)
        if not 0 < parts.size <= self.config.max_image_size * MIB:
            raise PayloadTooLarge(
                f"a content of {parts.size} bytes; the limit here is {self.config.max_image_size} MiB"
            )
        self.get(viewer, upload)
        for _ in range(TRIES):
            try:
                with self.database.write() as session:
                    content, cost = _usable_content(session, viewer, digest), 0
                    if content is None:
                        content = _add_content(session, viewer, digest, parts, layout)
                        cost = len(layout)  # a content of zeros has no segments, but its layout counts
                    add_missing(session, UploadContentRow, [{"upload": upload, "content": content}])
                    check_quota(session, self.config, viewer.user, cost)
                    record_use(session, viewer, upload, received=cost)
                    return
            except IntegrityError:
                self.get(viewer, upload)
        raise Unavailable("database", "segments were deleted meanwhile: send the content again")

    def _use(self, viewer: Viewer, upload: str) -> None:
        """Update the time of an upload's last use, unless it is recent."""
        retention = timedelta(seconds=self.config.upload_seconds)
        noted = self.get(viewer, upload).expires - retention
        if utc_now() - noted > retention / 10:
            with self.database.write() as session:
                record_use(session, viewer, upload)

    def _view(self, row: UploadRow) -> Upload:
        expires = row.touched + timedelta(seconds=self.config.upload_seconds)
        return Upload(id=row.id, size=row.size, received=row.received, expires=expires)


def upload_not_found(upload: str) -> NotFound:
    """Return the error for an upload that does not exist, or is another viewer's."""
    return NotFound(
        f"there is no upload {upload[:64]}", hint="it may have been dropped; begin a new one"
    )


def _check_open_uploads(session: Session, owner: str, limit: int) -> None:
    """Check the number of an owner's open uploads.  Raises Conflict."""
    take_transaction_lock(session, f"uploads of {owner}")
    own = (UploadRow.owner == owner, UploadRow.job_id == "")  # many checkpoints may be written at once
    count = session.scalar(select(func.count()).where(*own)) or 0
    if count >= limit:
        raise Conflict(
            f"{count} uploads of {owner} are open already",
            hint="publish or drop some; unused uploads are dropped after some time",
        )


def check_digests(digests: Sequence[bytes]) -> None:
    """Check number and size of digests.  Raises InvalidRequest."""
    if len(digests) > MAX_DIGESTS or any(len(digest) != 32 for digest in digests):
        raise InvalidRequest(
            f"at most {MAX_DIGESTS} digests of 32 bytes each can be asked about at once"
        )


def record_use(
    session: Session, viewer: Viewer, upload: str, content: int = 0, received: int = 0
) -> UploadRow:
    """Record the use of an upload and bytes received. Call it last: it locks the row.

    Raises NotFound.
    """
    mine = (UploadRow.id == upload, *is_own_upload(viewer))
    values = {
        "touched": utc_now(),
        "content": UploadRow.content + content,
        "received": UploadRow.received + received,
    }
    change = update(UploadRow).where(*mine).values(**values).returning(UploadRow)
    row = session.scalars(change, execution_options={"synchronize_session": False}).one_or_none()
    if row is None:
        raise upload_not_found(upload)
    return row


def link_segments(session: Session, upload: str, segments: Sequence[int]) -> None:
    """Keep segments while the upload runs.  Raises IntegrityError: upload or segment is gone."""
    rows = [{"upload": upload, "segment": segment} for segment in sorted(segments)]
    add_missing(session, UploadSegmentRow, rows)


def known_chunks(session: Session, viewer: Viewer, digests: Sequence[bytes]) -> set[bytes]:
    """Return those of the chunks that are in intact segments which the viewer may use."""
    query = (
        select(ChunkRow.digest)
        .join(SegmentRow, SegmentRow.id == ChunkRow.segment)
        .where(ChunkRow.digest.in_(digests), SegmentRow.damaged.is_(False), may_use_segment(viewer))
    )
    return set(session.scalars(query))


def lock_segments(
    session: Session, viewer: Viewer, digests: Sequence[bytes]
) -> dict[bytes, SegmentRow]:
    """Return the intact segments that the viewer may use, locked until the transaction ends."""
    found = {}
    for some in batches(digests):
        query = (
            select(SegmentRow)
            .where(SegmentRow.digest.in_(some), SegmentRow.damaged.is_(False))
            .where(may_use_segment(viewer))
            .order_by(SegmentRow.id)
            .with_for_update(read=True, key_share=True)
        )
        found.update({row.digest: row for row in session.scalars(query)})
    return found


def _usable_content(session: Session, viewer: Viewer, digest: str) -> int | None:
    query = select(ContentRow.id).where(ContentRow.digest == digest, may_use_content(viewer))
    return session.scalars(query.with_for_update(read=True, key_share=True)).one_or_none()


def _add_content(
    session: Session, viewer: Viewer, digest: str, parts: ContentLayout, layout: bytes
) -> int:
    """Insert a content, if it is new, of segments that the viewer may use; return its id."""
    wanted = {segment: parts.length(number) for number, segment in parts.stored()}
    here = lock_segments(session, viewer, sorted(wanted))
    lost = len(wanted) - len(here)
    if lost:
        raise MissingChunks(
            f"{lost} of the {len(wanted)} segments of {digest} are not here",
            hint="ask which are missing, and send those",
        )
    _check_lengths(parts, {segment: row.size for segment, row in here.items()})
    values = {"digest": digest, "size": parts.size, "layout": layout, "touched": utc_now()}
    row = upsert(
        session,
        ContentRow,
        values,
        key=("digest",),
        change=("touched",),
        returning=(ContentRow.id,),
    )
    pairs = [{"content": row.id, "segment": found.id} for found in here.values()]
    add_missing(session, ContentSegmentRow, sorted(pairs, key=lambda pair: pair["segment"]))
    return int(row.id)


def _check_lengths(parts: ContentLayout, sizes: dict[bytes, int]) -> None:
    for number, segment in parts.stored():
        if sizes[segment] != parts.length(number):
            raise InvalidRequest(
                f"segment {number} has {sizes[segment]} bytes, and {parts.length(number)} belong there"
            )


def is_zero_segment(digest: bytes, size: int) -> bool:
    """Whether a segment of ``size`` bytes is all zeros; such segments are not stored."""
    return size <= SEGMENT_BYTES and digest == zero_segment_digest(size)
