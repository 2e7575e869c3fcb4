"""Files that appear whole or not at all, and locks against threads and processes alike.

Every writer makes a file of its own in a directory of temporary ones and holds a lock on it, so
that what a crash left behind can be told from what somebody is still writing.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from vmjobs.durable import sync_directory


@contextmanager
def temporary(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A locked temporary file; removed at the end if it is still there."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        number, name = tempfile.mkstemp(dir=folder)
        path = Path(name)
        with os.fdopen(number, "w+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not is_at(file.fileno(), path):
                continue  # swept away as a leftover before it was locked
            try:
                yield cast(BinaryIO, file), path
            finally:
                if is_at(file.fileno(), path):
                    path.unlink(missing_ok=True)
        return


def keep(file: BinaryIO, path: Path, target: Path) -> None:
    """Give a temporary file its final name, so that it survives a power cut."""
    path.chmod(0o644)
    os.fsync(file.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    path.replace(target)
    sync_directory(target.parent)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether this open file is the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``. Raises OSError."""
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


def write_atomically(path: Path, data: bytes, folder: Path) -> None:
    """Have ``path`` hold ``data``: all of it or what it held before, also after a power cut.

    folder: for the temporary file, on the same file system.
    """
    with temporary(folder) as (file, name):
        write_all(file.fileno(), data, 0)
        keep(file, name, path)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that nobody holds a lock on: their writers are gone."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock, against threads and processes alike."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
