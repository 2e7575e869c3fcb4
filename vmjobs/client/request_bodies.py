"""Bodies of requests, besides JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Final

from vmjobs.file_transfer import ProgressCallback

PIECE_BYTES: Final = 256 * 1024


class FileBody:
    """A request's body: ``size`` bytes of ``source``, from its present position."""

    def __init__(self, source: BinaryIO, size: int, progress: ProgressCallback | None = None) -> None:
        self._source = source
        self._size = size
        self._progress = progress
        self._left = size
        self.repeatable = source.seekable()
        self._start = source.tell() if self.repeatable else 0

    def __len__(self) -> int:
        return self._size

    def read(self, length: int = -1) -> bytes:
        data = self._source.read(self._left if length < 0 else min(length, self._left))
        self._left -= len(data)
        if self._progress and data:
            self._progress(self._size - self._left, self._size)
        return data

    def rewind(self) -> None:
        """Go back to the start, to be sent again."""
        if self.repeatable:
            self._source.seek(self._start)
        self._left = self._size


class BytesBody:
    """A request's body in memory, sent in chunks: the timeout applies to each of them."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[bytes]:
        view = memoryview(self._data)
        return (bytes(view[at : at + PIECE_BYTES]) for at in range(0, len(view), PIECE_BYTES))
