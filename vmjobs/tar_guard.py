"""Limits what tarfile reads from a tar stream that a guest made.

The program beside each job of a node imports this, so of the modules that load slowly it imports only
tarfile.
"""

from __future__ import annotations

import tarfile
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

CHUNK = 1024 * 1024
#: Maximum number of refused entries that are listed.
MAX_REJECTED = 1000
#: Limits on headers: tarfile reads the extended headers of an entry (long names, pax, sparse maps)
#: into memory, and recursively. Bytes and reads for one entry, and bytes for all entries.
MAX_HEADER = 256 * 1024
MAX_HEADER_READS = 32
MAX_HEADERS = 192 * 1024 * 1024


class TarGuard:
    """A file that limits tarfile's reads to the needs of well-formed entries.

    tarfile reads long names and extended headers whole, with the size that the tar itself claims.

    max_headers: limit on the bytes of all headers; None: none, for callers that discard entries.
    """

    def __init__(self, file: IO[bytes], max_headers: int | None = MAX_HEADERS) -> None:
        self._file = file
        self._max = max_headers
        self._of_entry = self._reads = self._of_all = 0
        self._in_content = False

    @contextmanager
    def content(self) -> Iterator[None]:
        """Count the reads within the context as content; later reads as the next header."""
        self._in_content = True
        try:
            yield
        finally:
            self._in_content = False
            self._of_entry = self._reads = 0

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= CHUNK:
            raise tarfile.ReadError("an entry is too large")
        if not self._in_content:
            self._reads += 1
            self._of_entry += size
            self._of_all += size
            if (
                self._reads > MAX_HEADER_READS
                or self._of_entry > MAX_HEADER
                or (self._max is not None and self._of_all > self._max)
            ):
                raise tarfile.ReadError("the headers of an entry are too long")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def escape_name(text: str) -> str:
    """Escape a name for display, and limit its length."""
    return text.encode("utf-8", "backslashreplace").decode()[:1024]
