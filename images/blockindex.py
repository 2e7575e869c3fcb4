"""Index of the chunks in this node's contents, which a fetch need not transfer again.

Each fetched content has a file beside it with the digests of its chunks: 32 bytes each, in order,
zeros for a chunk without a recorded digest. The index is only a hint: a chunk that it finds is
verified before use.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from images.content import BLOCK, MAX_SIZE, SEGMENT_BLOCKS, block_digest, zero_block
from images.files import write_all

DIGEST_BYTES: Final = 32
#: The most chunks in an index, 16 GiB of content: the index is in memory during a fetch.
MAX_BLOCKS: Final = 256 * 1024
_UNKNOWN: Final = bytes(DIGEST_BYTES)
_RECORD: Final = SEGMENT_BLOCKS * DIGEST_BYTES
_MANY: Final = MAX_SIZE // BLOCK


def note_blocks(descriptor: int, number: int, digests: Sequence[bytes]) -> None:
    """Write the chunk digests of segment ``number`` into the file beside a content."""
    record = b"".join(_UNKNOWN if digest == zero_block() else digest for digest in digests)
    write_all(descriptor, record, number * _RECORD)


class BlockIndex:
    """Chunks of contents. contents: pairs of a content's file and its digest file."""

    def __init__(self, contents: Iterable[tuple[Path, Path]]) -> None:
        self._files: list[Path] = []
        #: Maps a chunk's digest to its file and its number there, in one integer to save memory.
        self._places: dict[bytes, int] = {}
        for content, beside in contents:
            with suppress(OSError):  # no digests were recorded, or the content was evicted
                self._add(content, beside)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._places

    def read(self, digest: bytes, size: int) -> bytes | None:
        """A chunk's bytes, verified; ``None`` if this node no longer has them."""
        place = self._places.get(digest)
        if place is None:
            return None
        which, number = divmod(place, _MANY)
        try:
            with self._files[which].open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, number * BLOCK)
        except OSError:
            return None
        return data if len(data) == size and block_digest(data) == digest else None

    def _add(self, content: Path, beside: Path) -> None:
        which = len(self._files)
        self._files.append(content)
        with beside.open("rb") as file:
            number = 0
            while (record := file.read(_RECORD)) and len(self._places) < MAX_BLOCKS:
                for begin in range(0, len(record), DIGEST_BYTES):
                    digest = record[begin : begin + DIGEST_BYTES]
                    if digest != _UNKNOWN:
                        self._places.setdefault(digest, which * _MANY + number)
                    number += 1
