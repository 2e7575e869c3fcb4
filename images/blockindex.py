"""Which blocks the contents of this node have, so that they need not come again.

Beside a content that was fetched there is a file with the digest of each of its blocks, 32 bytes
each in their order, zeros where none was noted. It is a hint and no more: a block that is found by
it is checked before it is used.
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
#: Blocks that are looked for at most, 16 GiB of content: the index is in memory during a fetch.
MAX_BLOCKS: Final = 256 * 1024
_UNKNOWN: Final = bytes(DIGEST_BYTES)
_RECORD: Final = SEGMENT_BLOCKS * DIGEST_BYTES
_MANY: Final = MAX_SIZE // BLOCK


def note_blocks(descriptor: int, number: int, digests: Sequence[bytes]) -> None:
    """Write the digests of segment ``number``'s blocks into the file beside a content."""
    record = b"".join(_UNKNOWN if digest == zero_block() else digest for digest in digests)
    write_all(descriptor, record, number * _RECORD)


class BlockIndex:
    """The blocks of some contents: pairs of a content's file and the file beside it."""

    def __init__(self, contents: Iterable[tuple[Path, Path]]) -> None:
        self._files: list[Path] = []
        #: Of each block which file has it, and at which block of it; in one number for the room.
        self._places: dict[bytes, int] = {}
        for content, beside in contents:
            with suppress(OSError):  # none was noted, or it was evicted
                self._add(content, beside)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._places

    def read(self, digest: bytes, size: int) -> bytes | None:
        """A block's bytes, checked; ``None`` if they are not to be had any more."""
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
