"""Reads contents of images: layouts, segments, and plain bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select

from images.content import CHUNK_BYTES, SEGMENT_BYTES, ContentLayout, zero_segment_digest
from images.segment import SegmentHeader, read_chunk
from repository.db.database import Database
from repository.images.access import holding_of
from repository.images.catalog import Catalog
from repository.images.permissions import Viewer
from repository.images.segments import SegmentStore, read_index
from repository.images.tables import (
    ContentRow,
    ContentSegmentRow,
    ImageContentRow,
    SegmentRow,
)
from repository.storage.objects import ObjectReader
from vmjobs.errors import DigestMismatch, InvalidRequest, NotFound
from vmjobs.wire import DamagedBlock, VerifyReport

_ZEROS: Final = bytes(CHUNK_BYTES)


@dataclass(frozen=True)
class ContentReader:
    """Bytes of images. Methods raise NotFound for an image that the viewer may not see."""

    database: Database
    catalog: Catalog
    segments: SegmentStore

    def layout(self, viewer: Viewer, digest: str, content: str) -> bytes:
        """Return the layout of one of an image's contents.  Raises DigestMismatch: it is damaged."""
        with self.database.read() as session:
            holding_of(session, viewer, digest)
            query = (
                select(ContentRow.layout)
                .join(ImageContentRow, ImageContentRow.content == ContentRow.id)
                .where(ImageContentRow.image == digest, ContentRow.digest == content)
            )
            data = session.scalars(query).one_or_none()
        if data is None:
            raise NotFound(f"the image {digest[:80]} has no content {content[:80]}")
        ContentLayout.parse(data, content)
        return data

    def open_segment(self, viewer: Viewer, digest: str, segment: bytes) -> ObjectReader:
        """Open a segment of an image, as it is stored; the reader has to verify it."""
        with self.database.read() as session:
            holding_of(session, viewer, digest)
            wanted = (
                select(ContentSegmentRow.segment)
                .join(ImageContentRow, ImageContentRow.content == ContentSegmentRow.content)
                .join(SegmentRow, SegmentRow.id == ContentSegmentRow.segment)
                .where(ImageContentRow.image == digest, SegmentRow.digest == segment)
            )
            if session.scalars(wanted.limit(1)).one_or_none() is None:
                raise NotFound(f"the image {digest[:80]} has no segment {segment.hex()[:80]}")
        return self.segments.open(segment)

    def read(self, parts: ContentLayout, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Yield verified bytes of a content, by its layout, at most a chunk (64 KiB) at a time.

        Args:
            offset, length: in bytes; a range beyond the end is cut.

        Raises DigestMismatch while iterating, at a damaged chunk.
        """
        end = parts.size if length is None else min(parts.size, offset + length)
        while offset < end:
            number, begin = divmod(offset, SEGMENT_BYTES)
            size = parts.length(number)
            stop = min(size, begin + end - offset)
            if parts.segments[number] == zero_segment_digest(size):
                yield from _zeros(stop - begin)
            else:
                yield from self._segment_bytes(parts.segments[number], begin, stop)
            offset += stop - begin

    def verify(self, viewer: Viewer, digest: str, segments: Sequence[bytes]) -> VerifyReport:
        """Verify all chunks of some of an image's segments, and mark damaged segments.

        Raises InvalidRequest if one of them is not a segment of the image.
        """
        known = self._own_segments(viewer, digest)
        strange = [segment for segment in segments if segment not in known]
        if strange:
            raise InvalidRequest(f"{strange[0].hex()[:80]} is not a segment of {digest}")
        damaged: list[DamagedBlock] = []
        lost: list[str] = []
        for segment in segments:
            try:
                with self.segments.open(segment) as reader:
                    found = find_damage(segment, reader)
                damaged += found
                why = found[0].why if found else ""
            except NotFound as error:
                lost.append(segment.hex())
                why = error.message
            if why:
                self._mark_segment_damaged(segment, why)
        return VerifyReport(checked=len(segments), damaged=tuple(damaged), missing=tuple(lost))

    def _own_segments(self, viewer: Viewer, digest: str) -> set[bytes]:
        known: set[bytes] = set()
        for part in self.catalog.parsed_manifest(viewer, digest).parts():
            layout = ContentLayout.parse(self.layout(viewer, digest, part.digest), part.digest)
            known.update(segment for _, segment in layout.stored())
        return known

    def _segment_bytes(self, segment: bytes, begin: int, end: int) -> Iterator[bytes]:
        """Yield bytes ``begin`` to ``end`` of a stored segment, a chunk at a time."""
        with self.segments.open(segment) as reader:
            index = _checked_index(segment, reader)
            for number in range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
                entry = index.entries[number]
                reader.seek(entry.offset)
                data = read_chunk(entry, reader.read(entry.length))
                yield data[max(0, begin - number * CHUNK_BYTES) : end - number * CHUNK_BYTES]

    def _mark_segment_damaged(self, segment: bytes, why: str) -> None:
        query = select(SegmentRow.id, SegmentRow.object).where(SegmentRow.digest == segment)
        with self.database.read() as session:
            row = session.execute(query).one_or_none()
        if row is not None:
            self.segments.mark_damaged(row.id, row.object, why)


def find_damage(segment: bytes, reader: ObjectReader) -> list[DamagedBlock]:
    """Return the damaged chunks of a segment; a single entry if its header is damaged."""
    name = segment.hex()
    try:
        index = _checked_index(segment, reader)
    except DigestMismatch as error:
        why = f"none of its blocks can be read: {error.message}"
        return [DamagedBlock(segment=name, number=0, why=why)]
    found = []
    for number, entry in enumerate(index.entries):
        reader.seek(entry.offset)
        try:
            read_chunk(entry, reader.read(entry.length))
        except DigestMismatch as error:
            found.append(DamagedBlock(segment=name, number=number, why=error.message))
    return found


def _checked_index(segment: bytes, reader: ObjectReader) -> SegmentHeader:
    index = read_index(reader)
    if index.digest != segment:
        raise DigestMismatch(f"the stored segment {segment.hex()} is another one")
    return index


def _zeros(count: int) -> Iterator[bytes]:
    while count > 0:
        yield _ZEROS[:count]
        count -= CHUNK_BYTES
