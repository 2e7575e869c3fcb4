"""Content-addressed files in a directory: written whole or not at all, checked when read.

Every writer makes a file of its own in ``tmp/`` and holds a lock on it, so that what a crash left
behind can be told from what somebody is still writing.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, cast

from vmjobs.durable import sync_directory
from vmjobs.errors import DigestMismatch, NotFound

_CHUNK: Final = 1 << 20
_HOLE: Final = 64 * 1024
_ZEROS: Final = bytes(_HOLE)


class SparseWriter(io.RawIOBase):
    """Writes to a file, leaving holes for zeros, and computes the digest on the way."""

    def __init__(self, file: BinaryIO, on_write: Callable[[int], None] | None = None) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._on_write = on_write
        self.size = 0

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Take the next bytes."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        for begin in range(0, len(view), _HOLE):
            piece = view[begin : begin + _HOLE]
            if piece == _ZEROS[: len(piece)]:
                self._file.seek(len(piece), os.SEEK_CUR)
            else:
                self._file.write(piece)
        self.size += len(view)
        if self._on_write is not None:
            self._on_write(self.size)
        return len(view)

    def finish(self) -> str:
        """Give the file its size, even where it ends in a hole, and return the digest."""
        self._file.truncate(self.size)
        return f"sha256:{self._hash.hexdigest()}"


class BlobFolder:
    """Blobs below ``root``: ``blobs/sha256/<2 hex digits>/<hex digits>``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._remove_leftovers()

    def path(self, digest: str) -> Path:
        """Where the blob is or would be."""
        name = digest.removeprefix("sha256:")
        return self.root / "blobs" / "sha256" / name[:2] / name

    @contextmanager
    def receive(self, on_write: Callable[[int], None] | None = None) -> Iterator[Incoming]:
        """A blob to be written; it is there only after :meth:`Incoming.commit`."""
        with _temporary(self.root / "tmp") as (file, path):
            yield Incoming(self, file, path, on_write)

    def put(self, stream: BinaryIO) -> tuple[str, int]:
        """Store what ``stream`` gives; returns its digest and size. Having it already is fine."""
        with self.receive() as incoming:
            while piece := stream.read(_CHUNK):
                incoming.sink.write(piece)
            return incoming.commit()

    def verified(self, digest: str, size: int | None = None) -> Path:
        """The blob's file, once its bytes are known to be right.

        A file that was found right is not read again while its inode, size and change time stay:
        starting from a cached image must not take longer the larger it is.

        Raises:
            NotFound: it is not here. DigestMismatch: its bytes are others than they were.
        """
        path = self.path(digest)
        try:
            with path.open("rb") as file:
                mark = _mark(os.fstat(file.fileno()))
                if size is not None and mark["size"] != size:
                    raise DigestMismatch(
                        f"{digest} ({path}) has {mark['size']} bytes instead of {size}"
                    )
                if self._seen(digest) == mark:
                    return path
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise NotFound(f"there is no blob {digest}") from None
        if f"sha256:{found}" != digest:
            raise DigestMismatch(
                f"{digest} is damaged: {path} has the digest sha256:{found}",
                hint="remove the file and fetch or build the image again",
            )
        self._note(digest, mark)
        return path

    def has(self, digest: str) -> bool:
        """True if the blob is here (its bytes are not looked at)."""
        return self.path(digest).is_file()

    def _seen(self, digest: str) -> dict[str, int] | None:
        try:
            return cast(dict[str, int], json.loads(self._note_path(digest).read_bytes()))
        except (OSError, ValueError):
            return None

    def _note(self, digest: str, mark: dict[str, int]) -> None:
        # A store that can only be read (not ours, a read-only mount) works as well; its blobs are
        # then read each time.
        with suppress(OSError):
            write_atomically(self._note_path(digest), json.dumps(mark).encode(), self.root / "tmp")

    def _note_path(self, digest: str) -> Path:
        return self.root / "verified" / digest.removeprefix("sha256:")

    def _remove_leftovers(self) -> None:
        """Remove temporary files that nobody holds a lock on: their writers are gone."""
        folder = self.root / "tmp"
        if not folder.is_dir():
            return
        for path in folder.iterdir():
            with suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)


class Incoming:
    """A blob on its way into a folder."""

    def __init__(
        self, folder: BlobFolder, file: BinaryIO, path: Path, on_write: Callable[[int], None] | None
    ) -> None:
        self._folder, self._file, self._path = folder, file, path
        self.sink = SparseWriter(file, on_write)

    @property
    def stream(self) -> BinaryIO:
        """Where to write the bytes."""
        return cast(BinaryIO, self.sink)

    def commit(self, expected: str | None = None) -> tuple[str, int]:
        """Make the blob appear; returns its digest and size.

        Raises:
            DigestMismatch: the bytes are not those of ``expected``; nothing is kept.
        """
        digest = self.sink.finish()
        if expected is not None and digest != expected:
            raise DigestMismatch(f"{expected} arrived damaged: its bytes have the digest {digest}")
        self._file.flush()
        self._path.chmod(0o644)
        os.fsync(self._file.fileno())
        target = self._folder.path(digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._path.replace(target)
        sync_directory(target.parent)
        self._folder._note(digest, _mark(target.stat()))
        return digest, self.sink.size


def _mark(status: os.stat_result) -> dict[str, int]:
    return {
        "inode": status.st_ino,
        "size": status.st_size,
        "changed": status.st_ctime_ns,
        "modified": status.st_mtime_ns,
    }


@contextmanager
def _temporary(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A locked temporary file; removed at the end if it is still there."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        number, name = tempfile.mkstemp(dir=folder)
        path = Path(name)
        with os.fdopen(number, "w+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, path):
                continue  # swept away as a leftover before it was locked
            try:
                yield cast(BinaryIO, file), path
            finally:
                if _is_at(file, path):
                    path.unlink(missing_ok=True)
        return


def _is_at(file: io.BufferedRandom | BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def write_atomically(path: Path, data: bytes, temporary: Path) -> None:
    """Have ``path`` hold ``data``: all of it or what it held before, also after a power cut."""
    with _temporary(temporary) as (file, name):
        file.write(data)
        file.flush()
        name.chmod(0o644)
        os.fsync(file.fileno())
        path.parent.mkdir(parents=True, exist_ok=True)
        name.replace(path)
        sync_directory(path.parent)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock, against threads and processes alike."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
