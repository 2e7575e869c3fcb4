"""Temporary files, with locks that tell active writers from killed ones.

A writer holds a lock on its temporary file; the kernel releases it when the process dies. The age of a
file matters only for the moment between creating and locking it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from vmjobs.errors import DISK_FULL_ERRNOS, StorageFull, Unavailable, reason_of
from vmjobs.fsync import sync_directory

#: A temporary file younger than this may not have been locked by its writer yet (seconds).
SETTLE_SECONDS: Final = 60.0


class Spool:
    """A directory of temporary files, shared between processes of one host."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextmanager
    def temporary(self) -> Iterator[tuple[Path, BinaryIO]]:
        """Create a locked temporary file; remove it afterwards unless it was renamed.

        Raises Unavailable("storage"), StorageFull.
        """
        with translated():
            make_directories(self.directory)
            path = self.directory / secrets.token_hex(16)
            file = path.open("x+b")
        try:
            with translated():
                fcntl.flock(file, fcntl.LOCK_EX)
            yield path, file
        finally:
            with translated():
                path.unlink(missing_ok=True)
                _close_unlinked(file)

    def clean(self) -> int:
        """Remove leftovers of killed writers; return their number.  Raises Unavailable("storage")."""
        with translated():
            paths = list(self.directory.iterdir()) if self.directory.is_dir() else []
            return sum(map(_remove_if_abandoned, paths))


def _close_unlinked(file: BinaryIO) -> None:
    """Close a file whose name is gone; ignore that its last bytes find no space."""
    try:
        file.close()
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise


def _remove_if_abandoned(path: Path) -> int:
    try:
        with path.open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime < SETTLE_SECONDS:
                return 0
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except (FileNotFoundError, BlockingIOError):
        return 0  # its writer has finished meanwhile, or still works
    return 1


def make_directories(directory: Path) -> None:
    """Make ``directory`` and its parents, so that each new name survives a power cut."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        sync_directory(path.parent)


@contextmanager
def translated() -> Iterator[None]:
    """Translate operating system errors to StorageFull or Unavailable("storage")."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise StorageFull("no room is left where blobs and images are kept") from error
        raise Unavailable("storage", f"the storage fails: {reason_of(error)}") from error
