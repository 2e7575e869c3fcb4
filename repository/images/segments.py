"""Stores segments, and opens them: verifies every chunk, and copies absent ones from elsewhere.

The object is stored before the row that names it, so that a row never names a missing object.
Every object has a key of its own, so that deleting an old object never hits a newer one.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import delete, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from images.content import CHUNKS_PER_SEGMENT, zero_chunk_digest
from images.segment import (
    MAX_STORED_BYTES,
    ChunkEncoding,
    ChunkEntry,
    SegmentHeader,
    build_segment,
    decompressor,
    header_size,
    parse_header,
    read_chunk,
)
from repository.db.database import Database
from repository.db.sql import add_missing, upsert
from repository.images.access import may_use_segment
from repository.images.permissions import Viewer
from repository.images.quota import check_quota
from repository.images.tables import ChunkRow, SegmentRow
from repository.images.uploads import (
    Uploads,
    is_zero_segment,
    known_chunks,
    link_segments,
    record_use,
    upload_not_found,
)
from repository.storage.objects import ORPHAN_SECONDS, ObjectReader, ObjectStore
from vmjobs.config import Config
from vmjobs.errors import (
    DigestMismatch,
    MissingChunks,
    NotFound,
    PayloadTooLarge,
    QuotaExceeded,
    Unavailable,
    VMJobsError,
)
from vmjobs.model import now as utc_now

logger = logging.getLogger(__name__)

FOLDER: Final = "segments"
#: Attempts to open a segment that is being replaced.
OPEN_ATTEMPTS: Final = 3
Body = tuple[ChunkEncoding, bytes | memoryview]


@dataclass(frozen=True)
class ChunkSource:
    """A source of an absent chunk. number: in the source; place: in the new segment."""

    segment: int
    object: str
    number: int
    place: int


@dataclass(frozen=True)
class SegmentStore:
    """Segments: each is a row in the database and an object."""

    database: Database
    objects: ObjectStore
    uploads: Uploads
    config: Config
    orphan_seconds: float = ORPHAN_SECONDS

    def put(self, viewer: Viewer, upload: str, digest: bytes, body: bytes) -> bool:
        """Store a segment; return whether it is new to the viewer, regardless of other users.

        Args:
            body: the segment (``images.segment``); chunks that the viewer has already may be absent.

        Raises:
            NotFound: no such upload.
            DigestMismatch: the bytes are damaged, or not this segment.
            MissingChunks: an absent chunk is not stored (any more): send all of them.
            PayloadTooLarge: more bytes than a segment can have.
            QuotaExceeded: beyond the announced size, or the owner's quota.
        """
        if len(body) > MAX_STORED_BYTES:
            raise PayloadTooLarge(f"a segment has at most {MAX_STORED_BYTES} bytes")
        index = parse_header(body, whole=len(body))
        if index.digest != digest:
            raise DigestMismatch(f"the segment is {index.digest.hex()}, not {digest.hex()}")
        self.uploads.get(viewer, upload)
        if is_zero_segment(digest, index.size) or self._is_stored(viewer, upload, digest):
            return False
        _check_blocks(index, body)
        whole = self._with_absent_chunks(viewer, index, body) if index.absent else body
        return self._store(viewer, upload, index, whole)

    def _is_stored(self, viewer: Viewer, upload: str, digest: bytes) -> bool:
        with self.database.read() as session:
            whole = (
                SegmentRow.digest == digest,
                SegmentRow.damaged.is_(False),
                may_use_segment(viewer),
            )
            if session.scalars(select(SegmentRow.id).where(*whole)).one_or_none() is None:
                return False
        return not self.uploads.missing_segments(viewer, upload, [digest])[0]

    def open(self, segment: bytes) -> ObjectReader:
        """Open a stored segment's object; if it is being replaced, the new one.

        Raises NotFound.
        """
        query = select(SegmentRow.object).where(SegmentRow.digest == segment)
        before = ""
        for _ in range(OPEN_ATTEMPTS):
            with self.database.read() as session:
                key = session.scalars(query).one_or_none()
            if key is None or key == before:
                break
            try:
                return self.objects.open(key)
            except NotFound:
                before = key
        raise NotFound(f"the segment {segment.hex()} is not in the store")

    # -- absent chunks

    def _with_absent_chunks(self, viewer: Viewer, index: SegmentHeader, body: bytes) -> bytes:
        """Return the segment with absent chunks copied from segments that the viewer may use."""
        view = memoryview(body)
        bodies: list[Body] = [(e.kind, view[e.offset : e.offset + e.length]) for e in index.entries]
        lost = self._fill_absent(viewer, index, bodies)
        if lost:
            raise MissingChunks(
                f"{lost} of the {len(index.absent)} blocks that were left out are not here",
                hint="send the segment again with all of its blocks",
            )
        return build_segment(index, bodies)

    def _fill_absent(self, viewer: Viewer, index: SegmentHeader, bodies: list[Body]) -> int:
        """Put the absent chunks into ``bodies``; return how many were not found."""
        left = set(index.absent)
        for place in index.absent:
            if index.entries[place].digest == zero_chunk_digest(index.entries[place].size):
                bodies[place] = (ChunkEncoding.ZEROS, b"")
                left.discard(place)
        for sources in self._find_sources(viewer, index, left):
            found = self._read_sources(sources, index)
            for place, stored in found.items():
                bodies[place] = stored
            left -= found.keys()
        return len(left)

    def _find_sources(
        self, viewer: Viewer, index: SegmentHeader, places: set[int]
    ) -> Iterator[list[ChunkSource]]:
        """Yield the sources of chunks, grouped by stored segment."""
        wanted = {index.entries[place].digest for place in places}
        query = (
            select(ChunkRow.digest, ChunkRow.number, SegmentRow.id, SegmentRow.object)
            .join(SegmentRow, SegmentRow.id == ChunkRow.segment)
            .where(ChunkRow.digest.in_(sorted(wanted)), SegmentRow.damaged.is_(False))
            .where(may_use_segment(viewer))
        )
        with self.database.read() as session:
            known = {row.digest: row for row in session.execute(query)}
        groups: dict[int, list[ChunkSource]] = {}
        for place in sorted(places):
            row = known.get(index.entries[place].digest)
            if row is not None:
                source = ChunkSource(row.id, row.object, row.number, place)
                groups.setdefault(row.id, []).append(source)
        yield from groups.values()

    def _read_sources(self, sources: Sequence[ChunkSource], index: SegmentHeader) -> dict[int, Body]:
        """Read and verify chunks of one stored segment; record damage and skip damaged chunks."""
        found: dict[int, Body] = {}
        try:
            with self.objects.open(sources[0].object) as reader:
                there = read_index(reader)
                for source in sources:
                    entry, stored = _stored_block(reader, there, source.number)
                    wanted = index.entries[source.place]
                    if entry.digest != wanted.digest:
                        raise DigestMismatch("a block is not where it was noted")
                    # A client that gives a wrong length must not get the chunk stored with that length.
                    if entry.size == wanted.size:
                        found[source.place] = (entry.kind, stored)
        except (NotFound, DigestMismatch) as error:
            self.mark_damaged(sources[0].segment, sources[0].object, error.message)
        return found

    def mark_damaged(self, segment: int, key: str, why: str) -> None:
        """Mark a stored segment as damaged: clients have to send it again, and no chunk is copied."""
        with self.database.write() as session:
            same = (SegmentRow.id == segment, SegmentRow.object == key)
            mark = update(SegmentRow).where(*same, SegmentRow.damaged.is_(False)).values(damaged=True)
            if session.scalars(mark.returning(SegmentRow.id)).one_or_none() is None:
                return  # replaced or marked meanwhile
            session.execute(delete(ChunkRow).where(ChunkRow.segment == segment))
        logger.error("the object %s is damaged: %s", key, why)

    # -- storing

    def _store(self, viewer: Viewer, upload: str, index: SegmentHeader, body: bytes) -> bool:
        key, began = object_key(index.digest), time.monotonic()
        try:
            self.objects.put_bytes(key, body)
            blocks = self._unknown_blocks(viewer, index)
            with self.database.write() as session:
                row = _segment_row(index, key, len(body))
                new, obsolete = self._record(session, viewer, upload, row, blocks)
                if time.monotonic() - began > self.orphan_seconds / 2:
                    raise Unavailable("storage", "the storage took too long; send the segment again")
        except Unavailable:
            raise  # there may be a row: the sweep decides about the object
        except IntegrityError as error:
            self._discard(key)
            raise upload_not_found(upload) from error
        except VMJobsError:
            self._discard(key)
            raise
        for old in obsolete:
            self._discard(old)
        return new

    def _unknown_blocks(self, viewer: Viewer, index: SegmentHeader) -> dict[bytes, int]:
        """Return numbers of the chunks that the viewer has in no other segment, in insert order."""
        numbers = {
            entry.digest: number
            for number, entry in enumerate(index.entries)
            if entry.digest != zero_chunk_digest(entry.size)
        }
        with self.database.read() as session:
            known = known_chunks(session, viewer, sorted(numbers))
        return {digest: numbers[digest] for digest in sorted(numbers.keys() - known)}

    def _record(
        self,
        session: Session,
        viewer: Viewer,
        upload: str,
        row: dict[str, object],
        blocks: Mapping[bytes, int],
    ) -> tuple[bool, list[str]]:
        """Insert a segment's row; return whether it is new to the viewer, and objects to remove."""
        key = str(row["object"])
        found = upsert(
            session,
            SegmentRow,
            row,
            key=("digest",),
            change=("touched",),
            returning=(SegmentRow.id, SegmentRow.object, SegmentRow.damaged),
        )
        stored = found.object == key or found.damaged
        known = select(SegmentRow.id).where(SegmentRow.id == found.id, may_use_segment(viewer))
        new = stored or session.scalars(known).one_or_none() is None
        obsolete = [] if found.object == key else [found.object if found.damaged else key]
        if found.damaged:
            mend = update(SegmentRow).where(SegmentRow.id == found.id)
            session.execute(mend.values(object=key, stored=row["stored"], damaged=False))
        if new:
            places = [{"digest": d, "segment": found.id, "number": n} for d, n in blocks.items()]
            add_missing(session, ChunkRow, places)
        link_segments(session, upload, [found.id])
        if new:
            self._charge(session, viewer, upload, int(str(row["size"])), int(str(row["stored"])))
        else:
            record_use(session, viewer, upload)
        return new, obsolete

    def _charge(self, session: Session, viewer: Viewer, upload: str, size: int, stored: int) -> None:
        """Count the bytes received.  Raises QuotaExceeded."""
        check_quota(session, self.config, viewer.user, stored)
        row = record_use(session, viewer, upload, content=size, received=stored)
        if row.content > row.size:
            raise QuotaExceeded(
                f"the upload was announced with {row.size} bytes of content, and {row.content} came",
                hint="begin an upload of the right size",
            )

    def _discard(self, key: str) -> None:
        """Remove an object that no row names; if that fails, the sweep does it."""
        try:
            self.objects.delete(key)
        except Unavailable as error:
            logger.warning("the object %s is left for the sweep: %s", key, error.message)


def object_key(digest: bytes) -> str:
    """Return a new key for a segment's object."""
    name = digest.hex()
    return f"{FOLDER}/{name[:2]}/{name[2:4]}/{name}.{secrets.token_hex(8)}"


def read_index(reader: ObjectReader) -> SegmentHeader:
    """Read the header of a stored segment.  Raises DigestMismatch."""
    return parse_header(reader.read(header_size(CHUNKS_PER_SEGMENT)), whole=reader.size)


def _stored_block(reader: ObjectReader, index: SegmentHeader, number: int) -> tuple[ChunkEntry, bytes]:
    """Read and verify a chunk in its stored form.  Raises DigestMismatch."""
    if number >= len(index.entries):
        raise DigestMismatch("a segment has fewer blocks than were noted")
    entry = index.entries[number]
    reader.seek(entry.offset)
    stored = reader.read(entry.length)
    read_chunk(entry, stored)
    return entry, stored


def _check_blocks(index: SegmentHeader, body: bytes) -> None:
    """Verify every chunk in the body.  Raises DigestMismatch."""
    view, using = memoryview(body), decompressor()
    for entry in index.entries:
        if entry.kind is not ChunkEncoding.ABSENT:
            read_chunk(entry, view[entry.offset : entry.offset + entry.length], using)


def _segment_row(index: SegmentHeader, key: str, stored: int) -> dict[str, object]:
    return {
        "digest": index.digest,
        "object": key,
        "stored": stored,
        "size": index.size,
        "touched": utc_now(),
    }
