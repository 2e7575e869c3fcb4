"""Byte streams that grow while a job runs: its output, its error output, its console.

Each stream is one file, in a directory of the attempt. Appending names the offset, so that a repeated
call changes nothing; a lock on the file serializes the writers of one stream.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from vmjobs.errors import Conflict, InvalidRequest, Unavailable, reason_of
from vmjobs.model import StreamName

CHUNK: Final = 256 * 1024
_ID: Final = re.compile(r"[0-9a-f]{32}")


class StreamReader:
    """A stream at its length when it was opened; more may have been appended since."""

    def __init__(self, path: Path | None, size: int) -> None:
        self.size = size
        self._path = path

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes from ``start`` up to, not including, ``stop`` (default: all)."""
        left = min(self.size, self.size if stop is None else stop) - start
        if self._path is None or left <= 0:
            return
        with _translated(), self._path.open("rb") as file:
            file.seek(start)
            while left > 0 and (chunk := file.read(min(CHUNK, left))):
                left -= len(chunk)
                yield chunk


class StreamStore:
    """Streams below one directory: ``<job's last 2>/<job>/<attempt>/<name>``.

    limit: bytes kept of one stream; further bytes are dropped.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self._root = root
        self._limit = limit

    def append(self, job_id: str, attempt: str, name: StreamName, offset: int, data: bytes) -> int:
        """Write ``data`` at ``offset``, keeping existing bytes; return the new size.

        Raises Conflict if ``offset`` is beyond the end, Unavailable("streams").
        """
        if offset < 0:
            raise InvalidRequest("a stream's offset cannot be negative")
        path = self._path(job_id, attempt, name)
        with _translated():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                return self._write(handle, offset, data)
            finally:
                os.close(handle)

    def _write(self, handle: int, offset: int, data: bytes) -> int:
        size = os.fstat(handle).st_size
        if offset > size and size < self._limit:
            raise Conflict(f"the stream has {size} bytes, offset {offset} would leave a hole")
        rest = memoryview(data)[max(0, size - offset) : max(0, self._limit - offset)]
        while rest:
            written = os.pwrite(handle, rest, size)
            size += written
            rest = rest[written:]
        return size

    def open(self, job_id: str, attempt: str, name: StreamName) -> StreamReader:
        """The stream as it is now; an empty one if nothing was written yet."""
        path = self._path(job_id, attempt, name)
        with _translated():
            try:
                return StreamReader(path, path.stat().st_size)
            except FileNotFoundError:
                return StreamReader(None, 0)

    def drop(self, job_id: str, attempt: str = "") -> None:
        """Remove the streams of an attempt, or of all; missing streams are no error.

        Raises Unavailable("streams").
        """
        folder = self._path(job_id, attempt or "0" * 32, StreamName.CONSOLE).parent
        with _translated(), suppress(FileNotFoundError):
            shutil.rmtree(folder if attempt else folder.parent)

    def _path(self, job_id: str, attempt: str, name: StreamName) -> Path:
        if not (_ID.fullmatch(job_id) and _ID.fullmatch(attempt)):
            raise InvalidRequest("job and attempt ids have 32 hex digits")
        return self._root / job_id[-2:] / job_id / attempt / StreamName(name).value


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable("streams", f"the stream store fails: {reason_of(error)}") from error
