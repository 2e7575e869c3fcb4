"""Fetches segments of an image: whole, or only the chunks that this node lacks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

from images.chunk_index import ChunkIndex
from images.content import CHUNK_BYTES, CHUNKS_PER_SEGMENT
from images.segment import (
    ChunkEncoding,
    ChunkEntry,
    SegmentHeader,
    decode_segment,
    header_size,
    parse_header,
    read_chunk,
)
from vmjobs.errors import DigestMismatch

#: A segment is fetched in ranges if its missing chunks are at most this fraction of it.
_MAX_MISSING_SHARE: Final = 0.5
#: Most ranges of one segment, and the largest gap that a range includes, in bytes.
_MAX_RANGES: Final = 8
_MAX_GAP_BYTES: Final = 64 * 1024
#: Number of chunks after which the share of local chunks counts, and the share below which segments
#: are fetched whole.
_TRIAL_CHUNKS: Final = 4 * CHUNKS_PER_SEGMENT
_MIN_LOCAL_SHARE: Final = 0.1
#: Smaller segments (bytes) are fetched whole: another request costs more than their bytes.
_SMALL_SEGMENT_BYTES: Final = 1024 * 1024


class ImageFetcher(Protocol):
    """Source of images; the client library implements it for the repository.

    Every method may raise NotFound and Unavailable, and is thread-safe.
    """

    def manifest(self, digest: str) -> bytes:
        """The manifest's exact bytes."""

    def signature(self, digest: str) -> str:
        """All signatures of an image, separated by spaces; may be empty."""

    def layout(self, image: str, content: str) -> bytes:
        """The layout of one content of an image."""

    def segment(self, image: str, segment: bytes) -> bytes:
        """A stored segment. segment: its digest, 32 bytes."""

    def segment_range(self, image: str, segment: bytes, begin: int, end: int) -> tuple[bytes, int]:
        """Bytes ``begin`` to ``end`` of a stored segment, and the segment's size."""


class CountingFetcher:
    """A fetcher that counts fetched bytes of contents by image. Thread-safe."""

    def __init__(self, fetch: ImageFetcher) -> None:
        self._fetcher = fetch
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.manifest = fetch.manifest
        self.signature = fetch.signature
        self.layout = fetch.layout

    def fetched(self, image: str) -> int:
        """Bytes of an image's contents that have been fetched so far."""
        return self._bytes[image]

    def segment(self, image: str, segment: bytes) -> bytes:
        data = self._fetcher.segment(image, segment)
        self._count(image, data)
        return data

    def segment_range(self, image: str, segment: bytes, begin: int, end: int) -> tuple[bytes, int]:
        data, size = self._fetcher.segment_range(image, segment, begin, end)
        self._count(image, data)
        return data, size

    def _count(self, image: str, data: bytes) -> None:
        with self._lock:
            self._bytes[image] += len(data)


class SegmentSource:
    """The segments of one image. Thread-safe."""

    def __init__(self, fetch: ImageFetcher, image: str, chunk_index: ChunkIndex) -> None:
        self._fetcher, self._image, self._chunk_index = fetch, image, chunk_index
        self._lock = threading.Lock()
        self._seen = self._local = 0

    def get(self, digest: bytes, size: int) -> tuple[bytes, list[bytes]]:
        """Fetch the content of a segment and its chunks' digests, all verified.

        Raises:
            NotFound, Unavailable: from the fetcher.
            DigestMismatch: the data is not the segment, or does not have ``size`` bytes.
        """
        if size > _SMALL_SEGMENT_BYTES and self._has_common_chunks():
            header = self.read_header(digest, size)
            if self._is_partly_local(header):
                chunks = dict(self.read_chunks(header, range(len(header.entries)), _MAX_RANGES))
                data = b"".join(chunks[number] for number in range(len(header.entries)))
                return data, [entry.digest for entry in header.entries]
        body = self._fetcher.segment(self._image, digest)
        data = decode_segment(body, digest)
        if len(data) != size:
            raise DigestMismatch(f"the segment {digest.hex()} has {len(data)} bytes instead of {size}")
        return data, [entry.digest for entry in parse_header(body, whole=len(body)).entries]

    def read_header(self, digest: bytes, size: int) -> SegmentHeader:
        """The header of a segment of ``size`` bytes. Raises as :meth:`get`."""
        length = header_size(-(-size // CHUNK_BYTES))
        data, whole = self._fetcher.segment_range(self._image, digest, 0, length)
        header = parse_header(data, whole=whole)
        if header.digest != digest or header.size != size:
            raise DigestMismatch(f"the header of segment {digest.hex()} belongs to another segment")
        return header

    def read_chunks(
        self, header: SegmentHeader, numbers: Iterable[int], max_ranges: int
    ) -> Iterator[tuple[int, bytes]]:
        """Yield chunks of a segment, from this node or the repository, verified, in any order.

        max_ranges: most requests. Raises as :meth:`get`.
        """
        missing: list[tuple[int, ChunkEntry]] = []
        for number in numbers:
            entry = header.entries[number]
            if entry.kind is ChunkEncoding.ZEROS:
                yield number, bytes(entry.size)
            elif (data := self._chunk_index.read(entry.digest, entry.size)) is not None:
                yield number, data
            else:
                missing.append((number, entry))
        for run in _group_ranges(missing, max_ranges):
            begin, end = run[0][1].offset, run[-1][1].offset + run[-1][1].length
            body, _ = self._fetcher.segment_range(self._image, header.digest, begin, end)
            for number, entry in run:
                start = entry.offset - begin
                yield number, read_chunk(entry, body[start : start + entry.length])

    def _has_common_chunks(self) -> bool:
        """Whether enough chunks so far were local to justify a request for a header."""
        with self._lock:
            return len(self._chunk_index) > 0 and (
                self._seen < _TRIAL_CHUNKS or self._local >= _MIN_LOCAL_SHARE * self._seen
            )

    def _is_partly_local(self, header: SegmentHeader) -> bool:
        """Whether it is cheaper to fetch the missing chunks than the whole segment."""
        stored = [entry for entry in header.entries if entry.kind is not ChunkEncoding.ZEROS]
        missing = [entry for entry in stored if entry.digest not in self._chunk_index]
        local = len(stored) - len(missing)
        with self._lock:
            self._seen += len(stored)
            self._local += local
        return local > 0 and sum(e.length for e in missing) <= _MAX_MISSING_SHARE * header.stored


def _group_ranges(
    missing: Sequence[tuple[int, ChunkEntry]], max_ranges: int
) -> Iterator[Sequence[tuple[int, ChunkEntry]]]:
    """Group chunks into ranges, one for each request, in the order of the segment."""
    starts = [0]
    for position in range(1, len(missing)):
        before, entry = missing[position - 1][1], missing[position][1]
        if entry.offset - (before.offset + before.length) > _MAX_GAP_BYTES:
            starts.append(position)
    if len(starts) > max_ranges:
        starts = [0]
    for begin, end in zip(starts, [*starts[1:], len(missing)], strict=True):
        if begin < end:
            yield missing[begin:end]
