"""Interface of object stores: bytes under a key, complete, durable once ``put`` returns."""

from __future__ import annotations

import io
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, ClassVar, Final

from vmjobs.closeable import Closeable
from vmjobs.errors import InvalidRequest

CHUNK: Final = 256 * 1024
MAX_KEY: Final = 200
#: Objects that no row names are removed at this age (seconds). A writer has half of this time to
#: insert the row of an object.
ORPHAN_SECONDS: Final = 3600.0
#: Parts start with a letter or digit, so that no part is ``.``, ``..``, hidden or an option.
_KEY: Final = re.compile(r"[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*")
_PREFIX: Final = re.compile(rf"({_KEY.pattern}/?)?")


@dataclass(frozen=True)
class ObjectInfo:
    """A stored object. ``size`` in bytes; ``modified``: when it was put, with its time zone."""

    key: str
    size: int
    modified: datetime


class ObjectReader(Closeable, ABC):
    """An open object: the bytes it had when it was opened, even if it is replaced meanwhile.

    size: in bytes. file: an open file with exactly these bytes, if there is one; closing it is as good
    as closing the reader.
    """

    def __init__(self, size: int, file: io.FileIO | None = None) -> None:
        self.size = size
        self.file = file

    @abstractmethod
    def read(self, n: int = -1) -> bytes:
        """Up to ``n`` bytes (all, if negative); fewer only at the end.

        Raises Unavailable("storage").
        """

    @abstractmethod
    def seek(self, offset: int) -> None:
        """Continue at ``offset``, in bytes from the start."""

    @abstractmethod
    def close(self) -> None:
        """Release the reader's resources."""


class ObjectStore(ABC):
    """Named bytes. Safe to share between threads, and between processes on the same storage.

    Keys are lower-case names joined by slashes, at most 200 characters; any other key raises
    InvalidRequest. No key may be a folder of another. Every method may raise Unavailable("storage"):
    the storage does not answer, or refuses access. Of concurrent puts of one key, one remains,
    complete.

    local: objects are files on this host; opening one is cheap.
    """

    local: ClassVar[bool] = False

    @abstractmethod
    def put(self, key: str, source: BinaryIO, size: int) -> None:
        """Store ``size`` bytes from ``source`` under ``key``, replacing an existing object.

        They are durable when this returns. If it raises, an existing object is unchanged.

        Raises:
            InvalidRequest: ``source`` has fewer than ``size`` bytes, or more.
            StorageFull: the storage is full.
        """

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store ``data``; see :meth:`put`."""
        self.put(key, io.BytesIO(data), len(data))

    def put_file(self, key: str, path: Path) -> None:
        """Store the bytes of a file that only the caller uses; it may be moved. See :meth:`put`."""
        with path.open("rb") as file:
            self.put(key, file, path.stat().st_size)

    @abstractmethod
    def open(self, key: str) -> ObjectReader:
        """Open an object for reading.  Raises NotFound."""

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Bytes of the object; ``None`` if there is none."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object, if it exists. Open readers go on if the store allows it."""

    @abstractmethod
    def keys(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects in the folder ``prefix`` and below (``""``: all), ordered by key.

        Objects put or deleted meanwhile may be missing or not.
        """

    @abstractmethod
    def clean(self) -> int:
        """Remove leftovers of killed writers; return their number."""

    @abstractmethod
    def check(self) -> None:
        """Check that the storage works.  Raises Unavailable("storage")."""

    def get(self, key: str) -> bytes:
        """All bytes of a small object.  Raises NotFound."""
        with self.open(key) as reader:
            return reader.read()


def is_key(text: str) -> bool:
    """Whether ``text`` is a valid key."""
    return len(text) <= MAX_KEY and _KEY.fullmatch(text) is not None


def checked_key(key: str) -> str:
    """Return ``key`` if it is valid.  Raises InvalidRequest."""
    if not is_key(key):
        raise InvalidRequest(f"{key[:100]!r} is not an object's key")
    return key


def checked_prefix(prefix: str) -> str:
    """Return ``prefix`` without a trailing slash, if it is valid.  Raises InvalidRequest."""
    if len(prefix) > MAX_KEY or not _PREFIX.fullmatch(prefix):
        raise InvalidRequest(f"{prefix[:100]!r} is not a folder of objects")
    return prefix.removesuffix("/")


def read_exactly(source: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the bytes of ``source``.  Raises InvalidRequest unless there are ``size`` of them."""
    left = size
    while chunk := source.read(min(CHUNK, left + 1)):
        left -= len(chunk)
        if left < 0:
            raise InvalidRequest(f"{size} bytes were announced and more came")
        yield chunk
    if left:
        raise InvalidRequest(f"{size} bytes were announced and {size - left} came")
