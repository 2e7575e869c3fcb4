"""Content-addressed storage: a blob's name is the digest of its bytes.

A blob appears whole or not at all: temporary file, fsync, rename, fsync of the directory. Whoever
writes holds a lock on the temporary file, so what a killed writer left is told from work in
progress without guessing by age. Every read is verified.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from vmjobs.durable import sync_directory
from vmjobs.errors import DigestMismatch, InvalidRequest, NotFound, PayloadTooLarge, Unavailable

CHUNK: Final = 256 * 1024
#: A temporary file younger than this may not have been locked by its writer yet (seconds).
SETTLE_SECONDS: Final = 60.0
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class BlobInfo:
    """A stored blob. ``new`` is false if the same bytes were there before."""

    digest: str
    size: int
    new: bool


class BlobReader:
    """A blob's bytes, verified while they pass.

    Iterating yields chunks; the last one is held back until the digest has been checked, so a
    reader that counts bytes notices a corrupt blob even if it ignores the exception.
    """

    def __init__(self, digest: str, file: BinaryIO, size: int) -> None:
        self.digest = digest
        self.size = size
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        """Raises DigestMismatch, naming the blob, instead of yielding the last chunk."""
        state = hashlib.sha256()
        held = b""
        while chunk := self._file.read(CHUNK):
            if held:
                yield held
            state.update(chunk)
            held = chunk
        if f"sha256:{state.hexdigest()}" != self.digest:
            raise DigestMismatch(
                f"blob {self.digest} is corrupt in the store",
                hint="upload the same file again: that replaces the stored bytes",
            )
        if held:
            yield held

    def read_all(self) -> bytes:
        """All bytes, verified; for small blobs."""
        return b"".join(self)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class BlobStore(ABC):
    """Where blobs are kept."""

    @abstractmethod
    def put(
        self, source: BinaryIO, *, digest: str | None = None, size: int | None = None, limit: int
    ) -> BlobInfo:
        """Store what ``source`` gives until its end.

        digest, size: what the bytes must be, where it is known; limit: in bytes.

        Raises:
            DigestMismatch: the bytes are not what ``digest`` names.
            InvalidRequest: there are more or fewer bytes than ``size``.
            PayloadTooLarge: there are more bytes than ``limit``.
            Unavailable: the disk is full or fails (``blobs``).
        """

    @abstractmethod
    def open(self, digest: str) -> BlobReader:
        """Open a blob for verified reading.  Raises NotFound."""

    @abstractmethod
    def size(self, digest: str) -> int | None:
        """Bytes of the blob; ``None`` if it is not here."""

    def has(self, digest: str) -> bool:
        """Whether the blob is here."""
        return self.size(digest) is not None

    @abstractmethod
    def clean(self) -> int:
        """Remove what killed writers left behind; how many files that were."""


class LocalBlobStore(BlobStore):
    """Blobs in a directory: ``sha256/<2 hex>/<2 hex>/<hex>``, work in progress in ``tmp/``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._temp = root / "tmp"

    def put(
        self, source: BinaryIO, *, digest: str | None = None, size: int | None = None, limit: int
    ) -> BlobInfo:
        """See :meth:`BlobStore.put`."""
        if digest is not None:
            self._path(digest)
        with _translated(), self._temporary() as (temp, file):
            found, length = _copy(source, file, size, limit)
            if digest is not None and found != digest:
                raise DigestMismatch(f"the bytes are {found}, not {digest}")
            if size is not None and length != size:
                raise InvalidRequest(f"{size} bytes were announced and {length} came")
            final = self._path(found)
            new = not final.exists()
            os.fsync(file.fileno())
            _make_directories(self._root, final.parent)
            # Also over a blob that is there: its bytes may have rotted, these were just verified.
            temp.replace(final)
            sync_directory(final.parent)
        return BlobInfo(found, length, new)

    def open(self, digest: str) -> BlobReader:
        """See :meth:`BlobStore.open`."""
        path = self._path(digest)
        with _translated():
            try:
                file = path.open("rb")
            except FileNotFoundError:
                raise NotFound(f"there is no blob {digest}") from None
            return BlobReader(digest, file, os.fstat(file.fileno()).st_size)

    def size(self, digest: str) -> int | None:
        """See :meth:`BlobStore.size`."""
        with _translated():
            try:
                return self._path(digest).stat().st_size
            except FileNotFoundError:
                return None

    def clean(self) -> int:
        """See :meth:`BlobStore.clean`."""
        removed = 0
        with _translated():
            for path in self._temp.glob("*") if self._temp.is_dir() else ():
                removed += _remove_if_abandoned(path)
        return removed

    def _path(self, digest: str) -> Path:
        match = _DIGEST.fullmatch(digest)
        if not match:
            raise InvalidRequest(f"{digest[:100]!r} is not a digest (sha256: and 64 hex digits)")
        name = match[1]
        return self._root / "sha256" / name[:2] / name[2:4] / name

    @contextmanager
    def _temporary(self) -> Iterator[tuple[Path, BinaryIO]]:
        """A locked file of our own; gone afterwards unless it was renamed."""
        _make_directories(self._root.parent, self._temp)
        path = self._temp / secrets.token_hex(16)
        with path.open("xb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield path, file
            finally:
                path.unlink(missing_ok=True)


def _copy(source: BinaryIO, file: BinaryIO, size: int | None, limit: int) -> tuple[str, int]:
    """Copy to the end of ``source``; digest and length. Stops early when there is too much."""
    state, length = hashlib.sha256(), 0
    while chunk := source.read(CHUNK):
        length += len(chunk)
        if length > limit:
            raise PayloadTooLarge(f"more than the {limit} bytes that are allowed here")
        if size is not None and length > size:
            raise InvalidRequest(f"{size} bytes were announced and more came")
        state.update(chunk)
        file.write(chunk)
    file.flush()
    return f"sha256:{state.hexdigest()}", length


def _remove_if_abandoned(path: Path) -> int:
    try:
        with path.open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < SETTLE_SECONDS:
                return 0
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except (FileNotFoundError, BlockingIOError):
        return 0  # somebody else's: finished meanwhile, or still at work
    return 1


def _make_directories(root: Path, directory: Path) -> None:
    """Make ``directory``, and have every new name below ``root`` survive a power cut."""
    missing = []
    while directory != root and not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for path in reversed(missing):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_directory(path.parent)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable("blobs", f"the blob store fails: {error.strerror or error}") from error
