"""Fetches segments of an image: whole, or only the chunks that this node lacks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from images.blockindex import BlockIndex
from images.content import BLOCK, SEGMENT_BLOCKS
from images.segment import Entry, Index, Kind, head_size, parse_index, read_block, unpack
from vmjobs.errors import DigestMismatch

#: A segment is fetched in ranges if its missing chunks are at most this fraction of it.
_WORTH: Final = 0.5
#: Most ranges of one segment, and the largest gap that a range includes, in bytes.
_MAX_RUNS: Final = 8
_GAP: Final = 64 * 1024
#: Number of chunks after which the share of local chunks counts, and the share below which segments
#: are fetched whole.
_TRIAL: Final = 4 * SEGMENT_BLOCKS
_IN_COMMON: Final = 0.1
#: Smaller segments (bytes) are fetched whole: another request costs more than their bytes.
_SMALL: Final = 1024 * 1024


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


class Counting:
    """A fetcher that counts fetched bytes of contents by image. Thread-safe."""

    def __init__(self, fetch: ImageFetcher) -> None:
        self._fetch = fetch
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.manifest = fetch.manifest
        self.signature = fetch.signature
        self.layout = fetch.layout

    def fetched(self, image: str) -> int:
        """Bytes of an image's contents that have been fetched so far."""
        return self._bytes[image]

    def segment(self, image: str, segment: bytes) -> bytes:
        """See :class:`ImageFetcher`."""
        data = self._fetch.segment(image, segment)
        self._count(image, data)
        return data

    def segment_range(self, image: str, segment: bytes, begin: int, end: int) -> tuple[bytes, int]:
        """See :class:`ImageFetcher`."""
        data, size = self._fetch.segment_range(image, segment, begin, end)
        self._count(image, data)
        return data, size

    def _count(self, image: str, data: bytes) -> None:
        with self._lock:
            self._bytes[image] += len(data)


class SegmentSource:
    """The segments of one image. Thread-safe."""

    def __init__(self, fetch: ImageFetcher, image: str, blocks: BlockIndex) -> None:
        self._fetch, self._image, self._blocks = fetch, image, blocks
        self._lock = threading.Lock()
        self._seen = self._known = 0

    def get(self, digest: bytes, size: int) -> tuple[bytes, list[bytes]]:
        """Fetch the content of a segment and its chunks' digests, all verified.

        Raises:
            NotFound, Unavailable: from the fetcher.
            DigestMismatch: the data is not the segment, or does not have ``size`` bytes.
        """
        found = self._patched(digest, size) if size > _SMALL and self._promising() else None
        if found is None:
            body = self._fetch.segment(self._image, digest)
            index = parse_index(body, whole=len(body))
            found = unpack(body, digest), index
        data, index = found
        if len(data) != size:
            raise DigestMismatch(f"the segment {digest.hex()} has {len(data)} bytes instead of {size}")
        return data, [entry.digest for entry in index.entries]

    def _promising(self) -> bool:
        """Whether enough chunks so far were local to justify a request for a header."""
        with self._lock:
            return len(self._blocks) > 0 and (
                self._seen < _TRIAL or self._known >= _IN_COMMON * self._seen
            )

    def _patched(self, digest: bytes, size: int) -> tuple[bytes, Index] | None:
        """Assemble a partly local segment; ``None`` if a whole fetch is cheaper."""
        head, whole = self._range(digest, 0, head_size(SEGMENT_BLOCKS))
        index = parse_index(head, whole=whole)
        if index.digest != digest or index.size != size:
            raise DigestMismatch(f"the header of segment {digest.hex()} belongs to another segment")
        missing, here = [], {}
        for number, entry in enumerate(index.entries):
            if entry.kind is Kind.ZEROS:
                continue
            if entry.digest in self._blocks:
                here[number] = entry
            else:
                missing.append((number, entry))
        with self._lock:
            self._seen += len(here) + len(missing)
            self._known += len(here)
        if not here or sum(entry.length for _, entry in missing) > _WORTH * whole:
            return None
        return self._assembled(digest, index, here, missing)

    def _assembled(
        self, digest: bytes, index: Index, here: dict[int, Entry], missing: list[tuple[int, Entry]]
    ) -> tuple[bytes, Index]:
        data = bytearray(index.size)
        for number, entry in here.items():
            block = self._blocks.read(entry.digest, entry.size)
            if block is None:
                missing.append((number, entry))  # damaged, or evicted meanwhile
            else:
                data[number * BLOCK : number * BLOCK + entry.size] = block
        missing.sort(key=lambda pair: pair[1].offset)
        for run in _runs(missing):
            begin, end = run[0][1].offset, run[-1][1].offset + run[-1][1].length
            body, _ = self._range(digest, begin, end)
            for number, entry in run:
                start = entry.offset - begin
                block = read_block(entry, body[start : start + entry.length])
                data[number * BLOCK : number * BLOCK + entry.size] = block
        return bytes(data), index

    def _range(self, digest: bytes, begin: int, end: int) -> tuple[bytes, int]:
        return self._fetch.segment_range(self._image, digest, begin, end)


def _runs(missing: Sequence[tuple[int, Entry]]) -> Iterator[Sequence[tuple[int, Entry]]]:
    """Group chunks into ranges, one for each request, in the order of the segment."""
    cuts = [0]
    for place in range(1, len(missing)):
        before, entry = missing[place - 1][1], missing[place][1]
        if entry.offset - (before.offset + before.length) > _GAP:
            cuts.append(place)
    if len(cuts) > _MAX_RUNS:
        cuts = [0]
    for begin, end in zip(cuts, [*cuts[1:], len(missing)], strict=True):
        if begin < end:
            yield missing[begin:end]
