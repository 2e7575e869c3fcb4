"""Files that appear whole or not at all, and locks against threads and processes alike.

Every writer makes a file of its own in a directory of temporary ones and holds a lock on it, so
that what a crash left behind can be told from what somebody is still writing.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, cast

from vmjobs.durable import sync_directory

#: Between two looks at a lock that somebody else holds.
WAIT_SECONDS: Final = 0.2


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
def exclusive(path: Path, waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold a lock, against threads and processes alike.

    waiting: called every now and then while somebody else has it; what it raises ends the wait.
    """
    while True:
        with opened_lock(path) as descriptor:
            if waiting is None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            while not try_lock(descriptor, fcntl.LOCK_EX):
                if waiting is not None:
                    waiting()
                time.sleep(WAIT_SECONDS)  # whoever lets go of a file's lock calls nobody
            if is_at(descriptor, path):
                yield
                return


@contextmanager
def shared(path: Path) -> Iterator[int]:
    """Hold a lock that others may hold as well, but nobody alone; yields its descriptor."""
    while True:
        with opened_lock(path) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if is_at(descriptor, path):
                yield descriptor
                return


@contextmanager
def free(path: Path) -> Iterator[bool]:
    """Hold a lock alone, if nobody else holds it; whether that is so."""
    with opened_lock(path) as descriptor:
        yield try_lock(descriptor, fcntl.LOCK_EX) and is_at(descriptor, path)


@contextmanager
def opened_lock(path: Path) -> Iterator[int]:
    """A lock's file. It may be removed by who holds the lock alone; :func:`is_at` tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, how: int) -> bool:
    """Take a lock unless somebody else has it; whether it was taken."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
