"""Caches the digests of pushed files, so that the next push need not read them again.

The user's cache directory has one file for each pushed file: a line that identifies it (any change
invalidates the digests), then one record for each segment.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, Final, Self

from images.chunk_index import DIGEST_BYTES, RECORD_BYTES, UNKNOWN
from images.store.files import mark_of, write_all

#: Most bytes of an upload's identifier.
_MAX_ID_BYTES: Final = 4096
#: Age of the last use after which a cache file is removed.
MAX_AGE_SECONDS: Final = 30 * 86400


class FileDigestCache:
    """Chunk digests of a file's segments from an earlier attempt, on disk; empty if unusable."""

    def __init__(self, file: BinaryIO | None, start: int = 0) -> None:
        self._file = file
        #: Offset of the first record; each segment's is at a fixed place, and zeros if unknown.
        self._start = start

    @classmethod
    def open(cls, folder: Path, path: Path) -> Self:
        """Open the cache of ``path``; it is empty if the file has changed since."""
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_old_files(folder)
            target = path.resolve()
            header = _header(target, target.stat())
            name = hashlib.sha256(os.fsencode(target)).hexdigest()[:32]
            handle = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            file = os.fdopen(handle, "r+b", buffering=0)
            with suppress(BlockingIOError):  # another push of the same file has it
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.utime(file.fileno())
                if os.pread(file.fileno(), len(header), 0) != header:
                    file.truncate(0)
                    write_all(file.fileno(), header, 0)
                return cls(file, len(header))
            file.close()
        return cls(None)

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._file is not None:
            self._file.close()

    def chunk_digests(self, number: int, count: int) -> list[bytes] | None:
        """The digests of a segment's ``count`` chunks; ``None``: unknown."""
        if self._file is None:
            return None
        try:
            data = os.pread(self._file.fileno(), count * DIGEST_BYTES, self._offset(number))
        except OSError:
            return None
        found = [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]
        return found if len(data) == count * DIGEST_BYTES and UNKNOWN not in found else None

    def save(self, number: int, chunk_digests: Sequence[bytes]) -> None:
        if self._file is not None:
            with suppress(OSError):
                write_all(self._file.fileno(), b"".join(chunk_digests), self._offset(number))

    def clear(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(0)

    def _offset(self, number: int) -> int:
        return self._start + number * RECORD_BYTES


def _header(path: Path, status: os.stat_result) -> bytes:
    fields = {"version": 2, "path": str(path), "device": status.st_dev, **mark_of(status)}
    return json.dumps(fields).encode() + b"\n"


def _remove_old_files(folder: Path) -> None:
    oldest = time.time() - MAX_AGE_SECONDS
    for path in folder.iterdir():
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()


class UploadState:
    """Identifier of the upload that the next push of a source to a service resumes."""

    def __init__(self, folder: Path, service: str, source: str) -> None:
        name = hashlib.sha256(f"{service}\n{source}".encode("utf-8", "surrogateescape")).hexdigest()
        self._path = folder / f"{name[:32]}.upload"
        self._file: BinaryIO | None = None  # locked; None if another push has the lock
        with suppress(OSError), ExitStack() as stack:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = stack.enter_context(self._path.open("a+b", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stack.pop_all()
            self._file = file

    def load(self) -> str:
        """The upload's identifier; empty if unknown or in use by another push."""
        if self._file is None:
            return ""
        self._file.seek(0)
        return self._file.read(_MAX_ID_BYTES).decode("ascii", "replace").strip()

    def save(self, upload: str) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(0)
                self._file.write(upload.encode("ascii"))

    def clear(self) -> None:
        """Remove the identifier: the upload has ended."""
        if self._file is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None
