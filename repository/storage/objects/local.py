"""Objects as files in a directory: temporary file, fsync, rename, fsync of the directory."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final

from repository.storage.objects.base import (
    ObjectInfo,
    ObjectReader,
    ObjectStore,
    checked_key,
    checked_prefix,
    read_exactly,
)
from repository.storage.spool import Spool, make_directories, translated
from vmjobs.errors import NotFound
from vmjobs.fsync import sync_directory

#: Errors for a missing object: a folder is not an object, and an object is not a folder.
_NOT_THERE: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class LocalObjects(ObjectStore):
    """An object's key is its path below ``root``; work in progress is in ``root/.tmp``."""

    local = True

    def __init__(self, root: Path) -> None:
        self._root = root
        self._spool = Spool(root / ".tmp")

    def put(self, key: str, source: BinaryIO, size: int) -> None:
        final = self._path(key)
        with self._spool.temporary() as (temp, file):
            for chunk in read_exactly(source, size):
                with translated():
                    file.write(chunk)
            with translated():
                file.flush()
                os.fsync(file.fileno())
                self._move(temp, final)

    def put_file(self, key: str, path: Path) -> None:
        """See :meth:`ObjectStore.put_file`: moves the file if it is on this file system."""
        final = self._path(key)
        with translated(), path.open("rb") as file:
            os.fsync(file.fileno())
            try:
                self._move(path, final)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                self.put(key, file, os.fstat(file.fileno()).st_size)

    def open(self, key: str) -> LocalReader:
        path = self._path(key)
        with translated():
            try:
                return LocalReader(path)
            except _NOT_THERE:
                raise NotFound(f"there is no object {key}") from None

    def size(self, key: str) -> int | None:
        with translated():
            try:
                found = self._path(key).stat()
            except _NOT_THERE:
                return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def delete(self, key: str) -> None:
        """See :meth:`ObjectStore.delete`. Folders stay: other processes may put objects into them."""
        path = self._path(key)
        with translated():
            try:
                path.unlink()
            except _NOT_THERE:
                return
            sync_directory(path.parent)

    def keys(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = checked_prefix(prefix)
        with translated():
            yield from _walk(self._root / folder, f"{folder}/" if folder else "")

    def clean(self) -> int:
        return self._spool.clean()

    def check(self) -> None:
        """See :meth:`ObjectStore.check`: creates a temporary file."""
        with self._spool.temporary():
            pass

    def _path(self, key: str) -> Path:
        return self._root / checked_key(key)

    def _move(self, path: Path, final: Path) -> None:
        self._make_folder(final.parent)
        path.replace(final)
        sync_directory(final.parent)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder, durably; wait for another process that makes the same one.

        Otherwise our object could be in a folder whose own name is lost in a power cut.
        """
        if not self._root.is_dir():
            make_directories(self._root)
        with _locked(self._root, fcntl.LOCK_SH):
            if folder.is_dir():
                return
        with _locked(self._root, fcntl.LOCK_EX):
            make_directories(folder)


class LocalReader(ObjectReader):
    """An open file. It stays readable when the object is replaced or deleted."""

    def __init__(self, path: Path) -> None:
        self._file = io.FileIO(path)
        super().__init__(os.fstat(self._file.fileno()).st_size, self._file)

    def read(self, n: int = -1) -> bytes:
        with translated():
            return self._file.read(n) or b""

    def seek(self, offset: int) -> None:
        self._file.seek(offset)

    def close(self) -> None:
        self._file.close()


@contextmanager
def _locked(directory: Path, how: int) -> Iterator[None]:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def _walk(folder: Path, prefix: str) -> Iterator[ObjectInfo]:
    """Yield files below ``folder`` in the order of their keys, not of their file names."""
    try:
        entries = [e for e in os.scandir(folder) if not e.name.startswith(".")]
    except _NOT_THERE:
        return
    for entry in sorted(entries, key=lambda e: f"{e.name}/" if e.is_dir() else e.name):
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), f"{prefix}{entry.name}/")
            continue
        try:
            found = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        modified = datetime.fromtimestamp(found.st_mtime, UTC)
        yield ObjectInfo(prefix + entry.name, found.st_size, modified)
