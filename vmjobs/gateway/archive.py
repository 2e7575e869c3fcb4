"""A backup of a gateway as one file: a tar of plain files, compressed with Zstandard.

A disk is two files: ``NAME.map``, a JSON list of [offset, length] and the size, and ``NAME.data``, the
bytes of these extents, so that holes stay holes. The last file is ``manifest.json``, with the size and
SHA-256 of all other files: an archive without it is incomplete.

The reader does not trust archives: it checks each header, and accepts only plain files with expected
names.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, Final

import zstandard

from vmjobs.errors import Conflict, DigestMismatch, InvalidRequest, StorageFull
from vmjobs.file_clone import clone_file
from vmjobs.model import FrozenModel
from vmjobs.paths import check_path

MANIFEST: Final = "manifest.json"
TAR_BLOCK_BYTES: Final = 512
CHUNK_BYTES: Final = 1024 * 1024
#: Maximum bytes of a file that is read into memory.
MAX_SMALL: Final = 32 * 1024 * 1024
#: Maximum number of files in a backup.
MAX_FILES: Final = 2000
#: Maximum bytes of a disk, holes included.
MAX_DISK: Final = 1 << 46
#: Maximum memory for decompression, in bytes.
MAX_WINDOW: Final = 128 * 1024 * 1024
#: Bytes that backing up and restoring leave free on the file system of the disks.
RESERVED_BYTES: Final = 64 * 1024 * 1024

ByteCallback = Callable[[int], object]


class Extents(FrozenModel):
    """The data ranges of a sparse file: (offset, length), ascending. size: of the file."""

    size: int
    extents: tuple[tuple[int, int], ...]

    @property
    def data(self) -> int:
        """Bytes of data, without holes."""
        return sum(length for _, length in self.extents)

    def checked(self) -> Extents:
        """Validate and return these extents.

        Raises:
            ValueError: no file can have them.
        """
        end = 0
        for offset, length in self.extents:
            if offset < end or length <= 0:
                raise ValueError("extents overlap")
            end = offset + length
        if not end <= self.size <= MAX_DISK:
            raise ValueError("the disk is too large, or an extent lies beyond its end")
        return self


class FileDigest(FrozenModel):
    size: int
    sha256: str


class Manifest(FrozenModel):
    files: dict[str, FileDigest]


def read_extents(file: BinaryIO) -> Extents:
    found: list[tuple[int, int]] = []
    size, offset = os.fstat(file.fileno()).st_size, 0
    with suppress(OSError):  # ENXIO: only a hole is left
        while offset < size:
            start = os.lseek(file.fileno(), offset, os.SEEK_DATA)
            offset = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            found.append((start, offset - start))
    return Extents(size=size, extents=tuple(found))


def take_snapshot(path: Path, reserve: int) -> BinaryIO | None:
    """Copy a disk into a file without a name, beside it; None: this file system cannot, or is too full.

    reserve: bytes that a copy leaves free. File systems with reflinks copy no data. The copy is gone
    when it is closed, or its process killed.
    """
    with ExitStack() as on_failure, suppress(OSError):
        disk = on_failure.enter_context(path.open("rb"))
        handle = os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o600)
        snapshot = on_failure.enter_context(os.fdopen(handle, "w+b"))
        if clone_file(disk, snapshot) or _copy_data(disk, snapshot, free_bytes(path.parent) - reserve):
            on_failure.pop_all()
            disk.close()
            return snapshot
    return None


def free_bytes(directory: Path) -> int:
    """Bytes that users may still write to the file system of a directory."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _copy_data(source: BinaryIO, target: BinaryIO, room: int) -> bool:
    """Copy a sparse file, without Python between its bytes; return whether it fits into the room."""
    extents = read_extents(source)
    if room < extents.data:
        return False
    for offset, length in extents.extents:
        done = 0
        while done < length:
            place = offset + done
            copied = os.copy_file_range(source.fileno(), target.fileno(), length - done, place, place)
            if not copied:
                return False
            done += copied
    target.truncate(extents.size)
    return True


class ArchiveWriter:
    """Writes a backup to ``file``. count: called with the number of disk bytes just written."""

    def __init__(self, file: BinaryIO, count: ByteCallback = lambda _bytes: None) -> None:
        self._sink = zstandard.ZstdCompressor(level=3, threads=-1).stream_writer(file, closefd=False)
        self._files: dict[str, FileDigest] = {}
        self._count = count

    def add(self, name: str, data: bytes) -> None:
        """Add a small file."""
        self._add(name, len(data), [data])

    def add_disk(self, name: str, file: BinaryIO) -> None:
        """Add a sparse file, which must not change meanwhile.

        Raises:
            Conflict: it changed.
        """
        extents = read_extents(file)
        self.add(f"{name}.map", extents.model_dump_json().encode())
        self._add(f"{name}.data", extents.data, self._read(file, extents))
        if os.fstat(file.fileno()).st_size != extents.size:
            raise Conflict(f"{name} changed while it was copied")

    def finish(self) -> None:
        """Write the manifest and the end of the archive."""
        data = Manifest(files=self._files).model_dump_json().encode()
        self._put(MANIFEST, len(data), [data])
        self._sink.write(b"\0" * (2 * TAR_BLOCK_BYTES))
        self._sink.close()  # type: ignore[no-untyped-call]

    def _read(self, file: BinaryIO, extents: Extents) -> Iterator[bytes]:
        for offset, length in extents.extents:
            done = 0
            while done < length:
                piece = os.pread(file.fileno(), min(CHUNK_BYTES, length - done), offset + done)
                if not piece:
                    return
                done += len(piece)
                self._count(len(piece))
                yield piece

    def _add(self, name: str, size: int, pieces: Iterable[bytes]) -> None:
        self._files[name] = FileDigest(size=size, sha256=self._put(name, size, pieces))

    def _put(self, name: str, size: int, pieces: Iterable[bytes]) -> str:
        info = tarfile.TarInfo(name)
        info.size, info.mode = size, 0o600
        self._sink.write(info.tobuf(tarfile.GNU_FORMAT))
        digest, left = hashlib.sha256(), size
        for piece in pieces:
            digest.update(piece)
            self._sink.write(piece)
            left -= len(piece)
        if left:
            raise Conflict(f"{name} became shorter while it was copied")
        self._sink.write(b"\0" * (-size % TAR_BLOCK_BYTES))
        return digest.hexdigest()


class ArchiveFile:
    """A file of a backup, which the caller reads once, in order."""

    def __init__(self, name: str, size: int, source: IO[bytes]) -> None:
        self.name, self.size = name, size
        self._source, self._left = source, size
        self._digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        data = _read_exactly(self._source, wanted)
        self._left -= len(data)
        self._digest.update(data)
        return data

    def read_small(self) -> bytes:
        """Read the whole file.

        Raises:
            InvalidRequest: it is too large.
        """
        if self.size > MAX_SMALL:
            raise InvalidRequest(f"{self.name} in the backup is too large")
        return self.read()

    def finish(self) -> FileDigest:
        """Skip the rest of the file; returns its size and digest."""
        while self._left:
            self.read(CHUNK_BYTES)
        return FileDigest(size=self.size, sha256=self._digest.hexdigest())


def read_archive(file: BinaryIO) -> Iterator[ArchiveFile]:
    """Yield the files of a backup; after the last one, verifies all of them.

    Raises:
        InvalidRequest: it is not a backup, or incomplete. DigestMismatch: it is damaged.
    """
    seen: dict[str, FileDigest] = {}
    try:
        with zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(
            file, closefd=False
        ) as source:
            for content in _entries(source):
                if content.name == MANIFEST:
                    _verify_files(Manifest.model_validate_json(content.read_small()), seen)
                    return
                if content.name in seen or len(seen) >= MAX_FILES:
                    raise InvalidRequest(f"the backup has {content.name!r} twice, or too many files")
                yield content
                seen[content.name] = content.finish()
    except (zstandard.ZstdError, tarfile.TarError, EOFError, ValueError) as error:
        raise InvalidRequest(f"this is not a backup of a gateway: {error}") from error
    raise InvalidRequest("the backup is incomplete: its manifest is missing")


def _entries(source: IO[bytes]) -> Iterator[ArchiveFile]:
    while True:
        header = _read_exactly(source, TAR_BLOCK_BYTES)
        if header == b"\0" * TAR_BLOCK_BYTES:
            return
        info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        if info.type != tarfile.REGTYPE or info.size < 0:
            raise InvalidRequest(f"the backup has an entry that is not a plain file: {info.name!r}")
        if why := check_path(info.name):
            raise InvalidRequest(f"the backup has a file with a bad name, {info.name!r}: {why}")
        content = ArchiveFile(info.name, info.size, source)
        yield content
        content.finish()
        _read_exactly(source, -info.size % TAR_BLOCK_BYTES)


def _read_exactly(source: IO[bytes], size: int) -> bytes:
    parts = []
    while size:
        part = source.read(size)
        if not part:
            raise EOFError("it is truncated")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _verify_files(manifest: Manifest, seen: dict[str, FileDigest]) -> None:
    for name in sorted(manifest.files.keys() | seen.keys()):
        if manifest.files.get(name) != seen.get(name):
            raise DigestMismatch(f"the backup is damaged: {name} does not match its digest")


def parse_extents(content: ArchiveFile) -> Extents:
    """Parse the map of a disk.

    Raises:
        InvalidRequest: it is malformed.
    """
    try:
        return Extents.model_validate_json(content.read_small()).checked()
    except ValueError as error:
        raise InvalidRequest(f"{content.name} in the backup is not a map of a disk") from error


def write_disk(content: ArchiveFile, extents: Extents, path: Path) -> None:
    """Restore a disk; it is durable when this returns.

    Raises:
        InvalidRequest: map and data differ in size. StorageFull: it does not fit.
    """
    if extents.data != content.size:
        raise InvalidRequest(f"{content.name} in the backup has another size than its map")
    if free_bytes(path.parent) < content.size + RESERVED_BYTES:
        raise StorageFull(f"{path.parent} has no room for {content.size} bytes of {content.name}")
    with path.open("xb") as file:
        for offset, length in extents.extents:
            file.seek(offset)
            left = length
            while left:
                piece = content.read(min(CHUNK_BYTES, left))
                file.write(piece)
                left -= len(piece)
        file.truncate(extents.size)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """Replace a file atomically once the context ends; only its owner can read it."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # left by a killed process
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
