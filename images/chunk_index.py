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

from images.content import (
    CHUNK_BYTES,
    CHUNKS_PER_SEGMENT,
    MAX_CONTENT_BYTES,
    chunk_digest,
    zero_chunk_digest,
)
from images.store.files import write_all

DIGEST_BYTES: Final = 32
#: The most chunks in an index, 16 GiB of content: the index is in memory during a fetch.
MAX_CHUNKS: Final = 256 * 1024
#: In place of the digest of a chunk without one.
UNKNOWN: Final = bytes(DIGEST_BYTES)
#: Bytes for the digests of one segment.
RECORD_BYTES: Final = CHUNKS_PER_SEGMENT * DIGEST_BYTES
_MAX_CHUNKS_PER_CONTENT: Final = MAX_CONTENT_BYTES // CHUNK_BYTES


def write_chunk_digests(descriptor: int, number: int, digests: Sequence[bytes]) -> None:
    """Write the chunk digests of segment ``number`` into the file beside a content."""
    record = b"".join(UNKNOWN if digest == zero_chunk_digest() else digest for digest in digests)
    write_all(descriptor, record, number * RECORD_BYTES)


class ChunkIndex:
    """Chunks of contents. contents: pairs of a content's file and its digest file."""

    def __init__(self, contents: Iterable[tuple[Path, Path]]) -> None:
        self._files: list[Path] = []
        #: Maps a chunk's digest to its file and its number there, in one integer to save memory.
        self._locations: dict[bytes, int] = {}
        for content, digest_file in contents:
            with suppress(OSError):  # no digests were recorded, or the content was evicted
                self._add(content, digest_file)

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._locations

    def read(self, digest: bytes, size: int) -> bytes | None:
        """A chunk's bytes, verified; ``None`` if this node no longer has them."""
        location = self._locations.get(digest)
        if location is None:
            return None
        file_number, number = divmod(location, _MAX_CHUNKS_PER_CONTENT)
        try:
            with self._files[file_number].open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, number * CHUNK_BYTES)
        except OSError:
            return None
        return data if len(data) == size and chunk_digest(data) == digest else None

    def _add(self, content: Path, digest_file: Path) -> None:
        file_number = len(self._files)
        self._files.append(content)
        with digest_file.open("rb") as file:
            number = 0
            while (record := file.read(RECORD_BYTES)) and len(self._locations) < MAX_CHUNKS:
                for begin in range(0, len(record), DIGEST_BYTES):
                    digest = record[begin : begin + DIGEST_BYTES]
                    if digest != UNKNOWN:
                        self._locations.setdefault(
                            digest, file_number * _MAX_CHUNKS_PER_CONTENT + number
                        )
                    number += 1
