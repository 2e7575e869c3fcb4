"""Content-addressed storage: a blob's name is the digest of its bytes.

A blob appears whole or not at all: it is spooled while its digest is computed, and then put into the
object store under that digest. Every read is verified.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from repository.storage.objects.base import CHUNK, ObjectInfo, ObjectReader, ObjectStore
from repository.storage.spool import Spool, translated
from vmjobs.closeable import Closeable
from vmjobs.errors import DigestMismatch, InvalidRequest, NotFound, PayloadTooLarge

BLOB_FOLDER: Final = "blobs/sha256"
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class BlobInfo:
    """A stored blob."""

    digest: str
    size: int


class BlobReader(Closeable):
    """A blob's bytes, verified while they are read.

    Iterating yields chunks; the last one is held back until the digest has been checked, so a
    reader that counts bytes notices a corrupt blob even if it ignores the exception.
    """

    def __init__(self, digest: str, stored: ObjectReader) -> None:
        self.digest = digest
        self.size = stored.size
        self._stored = stored

    def __iter__(self) -> Iterator[bytes]:
        """Raises DigestMismatch, naming the blob, instead of yielding the last chunk."""
        state = hashlib.sha256()
        held = b""
        while chunk := self._stored.read(CHUNK):
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

    def close(self) -> None:
        self._stored.close()


class BlobStore:
    """Blobs among other objects, as ``blobs/sha256/<2 hex>/<2 hex>/<hex>``.

    Every method may raise Unavailable("storage"), and InvalidRequest for an invalid digest.
    """

    def __init__(self, objects: ObjectStore, spool: Path) -> None:
        """``spool``: a directory for temporary files, best on the objects' file system."""
        self._objects = objects
        self._spool = Spool(spool)

    def put(
        self,
        source: BinaryIO,
        *,
        digest: str | None = None,
        size: int | None = None,
        limit: int,
        admit: Callable[[str, int], None] = lambda _digest, _size: None,
    ) -> BlobInfo:
        """Store all bytes of ``source``.

        digest, size: expected values, if known; limit: in bytes. admit: called with digest and size
        after all bytes are read and before they are stored; it may raise to refuse them.

        Raises:
            DigestMismatch: the bytes do not have the digest ``digest``.
            InvalidRequest: there are more or fewer bytes than ``size``.
            PayloadTooLarge: there are more bytes than ``limit``.
            StorageFull: the storage is full.
        """
        if digest is not None:
            key_of(digest)
        with self._spool.temporary() as (path, file):
            found, length = _copy(source, file, size, limit)
            if digest is not None and found != digest:
                raise DigestMismatch(f"the bytes are {found}, not {digest}")
            if size is not None and length != size:
                raise InvalidRequest(f"{size} bytes were announced and {length} came")
            admit(found, length)
            # Replaces an existing blob, too: its bytes may be corrupt, these were just verified.
            self._objects.put_file(key_of(found), path)
        return BlobInfo(found, length)

    def open(self, digest: str) -> BlobReader:
        """Open a blob for verified reading.  Raises NotFound."""
        try:
            return BlobReader(digest, self._objects.open(key_of(digest)))
        except NotFound:
            raise NotFound(f"there is no blob {digest}") from None

    def size(self, digest: str) -> int | None:
        """Bytes of the blob; ``None`` if it does not exist."""
        return self._objects.size(key_of(digest))

    def stored(self) -> Iterator[tuple[str, ObjectInfo]]:
        """Yield the digest and the object of each blob."""
        for info in self._objects.keys(BLOB_FOLDER):
            digest = f"sha256:{info.key.rpartition('/')[2]}"
            if _DIGEST.fullmatch(digest):
                yield digest, info

    def delete(self, digest: str) -> None:
        """Remove a blob; a blob that does not exist is no error."""
        self._objects.delete(key_of(digest))

    def clean(self) -> int:
        """Remove leftovers of killed writers; return their number."""
        return self._spool.clean() + self._objects.clean()


def key_of(digest: str) -> str:
    match = _DIGEST.fullmatch(digest)
    if not match:
        raise InvalidRequest(f"{digest[:100]!r} is not a digest (sha256: and 64 hex digits)")
    name = match[1]
    return f"{BLOB_FOLDER}/{name[:2]}/{name[2:4]}/{name}"


def _copy(source: BinaryIO, file: BinaryIO, size: int | None, limit: int) -> tuple[str, int]:
    """Copy ``source`` and return digest and length. Stops early when there are too many bytes."""
    state, length = hashlib.sha256(), 0
    while chunk := source.read(CHUNK):
        length += len(chunk)
        if length > limit:
            raise PayloadTooLarge(f"more than the {limit} bytes that are allowed here")
        if size is not None and length > size:
            raise InvalidRequest(f"{size} bytes were announced and more came")
        state.update(chunk)
        with translated():
            file.write(chunk)
    with translated():
        file.flush()
    return f"sha256:{state.hexdigest()}", length
