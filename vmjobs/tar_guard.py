"""A guard between tarfile and a tar stream that a guest made.

What runs beside each job of a node imports this: no module but tarfile that takes long to import is
needed.
"""

from __future__ import annotations

import tarfile
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

CHUNK = 1024 * 1024
#: Refused entries that are listed.
MAX_REJECTED = 1000
#: What tarfile may read to find the next entry: headers that stand before it and say more of it
#: (long names, pax, sparse maps) are read into memory, each within the one before. Bytes and reads
#: for one entry, and bytes for all.
MAX_HEADER = 256 * 1024
MAX_HEADER_READS = 32
MAX_HEADERS = 192 * 1024 * 1024


class Guarded:
    """A file from which tarfile can read no more at once than any honest entry needs.

    Long names and extended headers are read whole, with the size that the tar itself claims.

    max_headers: bytes that all headers together may have; None: entries are not kept in memory.
    """

    def __init__(self, file: IO[bytes], max_headers: int | None = MAX_HEADERS) -> None:
        self._file = file
        self._max = max_headers
        self._of_entry = self._reads = self._of_all = 0
        self._in_content = False

    @contextmanager
    def content(self) -> Iterator[None]:
        """What is read in the context is an entry's content; after it the next entry is looked for."""
        self._in_content = True
        try:
            yield
        finally:
            self._in_content = False
            self._of_entry = self._reads = 0

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= CHUNK:
            raise tarfile.ReadError("an entry claims to be absurdly large")
        if not self._in_content:
            self._reads += 1
            self._of_entry += size
            self._of_all += size
            if (
                self._reads > MAX_HEADER_READS
                or self._of_entry > MAX_HEADER
                or (self._max is not None and self._of_all > self._max)
            ):
                raise tarfile.ReadError("an entry has absurdly long headers")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def shown(text: str) -> str:
    """A name, whatever it is made of, as text of bounded length."""
    return text.encode("utf-8", "backslashreplace").decode()[:1024]
