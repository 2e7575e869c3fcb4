"""Atomic writes of files, and file locks that exclude threads and processes alike.

Each writer creates and locks a file in a directory of temporary files, so that files that a crash
left behind can be distinguished from files in use.
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

from vmjobs.fsync import sync_directory

#: Interval between two attempts at a held lock, in seconds.
LOCK_POLL_SECONDS: Final = 0.2

#: Attributes that change when a file's bytes change.
FileMark = dict[str, int]


def mark_of(status: os.stat_result) -> FileMark:
    """The mark of a file, which is stored as JSON beside what was computed from its bytes."""
    return {
        "inode": status.st_ino,
        "size": status.st_size,
        "modified": status.st_mtime_ns,
        "changed": status.st_ctime_ns,
    }


@contextmanager
def temporary(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Create and lock a temporary file; remove it at the end if it is still there."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        number, name = tempfile.mkstemp(dir=folder)
        path = Path(name)
        with os.fdopen(number, "w+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not is_at_path(file.fileno(), path):
                continue  # removed as a leftover before it was locked
            try:
                yield cast(BinaryIO, file), path
            finally:
                if is_at_path(file.fileno(), path):
                    path.unlink(missing_ok=True)
        return


def move_into_place(file: BinaryIO, path: Path, target: Path) -> None:
    """Give a temporary file its final name, durably against power loss."""
    path.chmod(0o644)
    os.fsync(file.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    path.replace(target)
    sync_directory(target.parent)


def is_at_path(descriptor: int, path: Path) -> bool:
    """Whether this open file is still the file at ``path``."""
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
    """Replace the contents of ``path`` atomically, also in case of power loss.

    folder: directory for the temporary file, on the same file system.
    """
    with temporary(folder) as (file, name):
        write_all(file.fileno(), data, 0)
        move_into_place(file, name, path)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files without a lock: their writers have exited."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)


@contextmanager
def exclusive_lock(path: Path, waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold an exclusive lock.

    waiting: called repeatedly while the lock is held elsewhere; an exception from it ends the wait.
    """
    while True:
        with open_lock_file(path) as descriptor:
            if waiting is None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            while not try_lock(descriptor, fcntl.LOCK_EX):
                if waiting is not None:
                    waiting()
                time.sleep(LOCK_POLL_SECONDS)  # the release of a file lock sends no notification
            if is_at_path(descriptor, path):
                yield
                return


@contextmanager
def shared_lock(path: Path) -> Iterator[int]:
    """Hold a shared lock; yields its descriptor."""
    while True:
        with open_lock_file(path) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if is_at_path(descriptor, path):
                yield descriptor
                return


@contextmanager
def try_exclusive_lock(path: Path) -> Iterator[bool]:
    """Try to hold an exclusive lock without waiting; yields whether that succeeded."""
    with open_lock_file(path) as descriptor:
        yield try_lock(descriptor, fcntl.LOCK_EX) and is_at_path(descriptor, path)


@contextmanager
def open_lock_file(path: Path) -> Iterator[int]:
    """Open a lock file. Its holder may remove it: check :func:`is_at_path` then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, operation: int) -> bool:
    """Try to take a lock without waiting; whether that succeeded."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
