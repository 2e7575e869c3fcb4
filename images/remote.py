"""The segments of an image from elsewhere: whole, or only those of their blocks that are not here."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from images.blockindex import BlockIndex
from images.content import BLOCK, SEGMENT_BLOCKS
from images.segment import Entry, Index, Kind, head_size, parse_index, read_block, unpack
from vmjobs.errors import DigestMismatch

#: A segment whose missing blocks are less than this part of it is asked for in pieces.
_WORTH: Final = 0.5
#: Pieces that are asked for of one segment at most, and the gap that is fetched along, in bytes.
_MAX_RUNS: Final = 8
_GAP: Final = 64 * 1024
#: Blocks that are looked at before it is said that an image has little in common with others.
_TRIAL: Final = 4 * SEGMENT_BLOCKS
_IN_COMMON: Final = 0.1
#: Smaller segments are fetched whole, in bytes: another request costs more than their bytes.
_SMALL: Final = 1024 * 1024


class ImageFetcher(Protocol):
    """Where images come from; the client library has one that speaks to the repository.

    Every method raises NotFound or Unavailable, and may be called by several threads at once.
    """

    def manifest(self, digest: str) -> bytes:
        """The manifest's exact bytes."""

    def signature(self, digest: str) -> str:
        """All signatures of an image, with spaces between; empty: it has none."""

    def layout(self, image: str, content: str) -> bytes:
        """The layout of one of an image's contents."""

    def segment(self, image: str, segment: bytes) -> bytes:
        """A stored segment, by its digest's 32 bytes."""

    def segment_range(self, image: str, segment: bytes, begin: int, end: int) -> tuple[bytes, int]:
        """Bytes of a stored segment, fewer where it ends; and how many bytes the whole has."""


class Counting:
    """A fetcher that counts what it brings: bytes of contents, by image. For several threads."""

    def __init__(self, fetch: ImageFetcher) -> None:
        self._fetch = fetch
        self._bytes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.manifest = fetch.manifest
        self.signature = fetch.signature
        self.layout = fetch.layout

    def fetched(self, image: str) -> int:
        """Bytes of an image's contents that were fetched so far."""
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
    """The segments of one image. Safe to use from several threads."""

    def __init__(self, fetch: ImageFetcher, image: str, blocks: BlockIndex) -> None:
        self._fetch, self._image, self._blocks = fetch, image, blocks
        self._lock = threading.Lock()
        self._seen = self._known = 0

    def get(self, digest: bytes, size: int) -> tuple[bytes, list[bytes]]:
        """The content of a segment and its blocks' digests, all checked.

        Raises:
            NotFound, Unavailable: as the fetcher does.
            DigestMismatch: what came is not the segment, or it has not ``size`` bytes.
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
        """Whether blocks of the segments so far were here; the head of another is a request more."""
        with self._lock:
            return len(self._blocks) > 0 and (
                self._seen < _TRIAL or self._known >= _IN_COMMON * self._seen
            )

    def _patched(self, digest: bytes, size: int) -> tuple[bytes, Index] | None:
        """A segment of which much is here; ``None`` if it had better be fetched whole."""
        head, whole = self._range(digest, 0, head_size(SEGMENT_BLOCKS))
        index = parse_index(head, whole=whole)
        if index.digest != digest or index.size != size:
            raise DigestMismatch(f"the head of the segment {digest.hex()} is another one's")
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
    """Blocks that are fetched by one request each, in order of their places in the segment."""
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
