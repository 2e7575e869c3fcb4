"""Reads files that other processes append to, and notices their changes (inotify(7))."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

_libc = ctypes.CDLL(None, use_errno=True)
_IN_MODIFY = 0x2
#: Watch, mask, cookie, length of a name, which events of watched files do not have.
_EVENT = struct.Struct("iIII")
MAX_PIECE_BYTES = 512 * 1024


def read_piece(path: Path, offset: int, limit: int = MAX_PIECE_BYTES) -> bytes:
    """Return the next bytes of a growing file; ``b""`` at its end, or if it does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(min(MAX_PIECE_BYTES, limit))
    except FileNotFoundError:
        return b""


class _InotifyReader:
    """All watches of this process: a user may have few inotify instances."""

    def __init__(self) -> None:
        self._handle = _check_result(_libc.inotify_init1(os.O_CLOEXEC))
        self._events: dict[int, int] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="growth", daemon=True).start()

    def watch(self, path: Path, event: int) -> int:
        """Add 1 to an eventfd whenever the file changes; return the watch's number.

        Raises:
            OSError: the file does not exist, or the user may have no more watches.
        """
        with self._lock:
            watch = _check_result(_libc.inotify_add_watch(self._handle, os.fsencode(path), _IN_MODIFY))
            self._events[watch] = event
            return watch

    def remove(self, watch: int) -> None:
        with self._lock:
            del self._events[watch]
            _libc.inotify_rm_watch(self._handle, watch)  # fails if the file is gone

    def _run(self) -> None:
        while True:
            for watch, *_ in _EVENT.iter_unpack(os.read(self._handle, 256 * _EVENT.size)):
                with self._lock:
                    if (event := self._events.get(watch)) is not None:
                        os.eventfd_write(event, 1)


_creation_lock = threading.Lock()


def _reader() -> _InotifyReader:
    with _creation_lock:  # without the lock two threads could fill the cache twice
        return _cached_reader()


@functools.cache
def _cached_reader() -> _InotifyReader:
    return _InotifyReader()


class FileWatch:
    """Watches a file while the context lasts; a process can have one watch of a file.

    A file that does not exist yet, or cannot be watched, counts as always changing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watch: int | None = None

    def __enter__(self) -> Self:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        if self._watch is not None:
            _reader().remove(self._watch)
        os.close(self._event)

    def fileno(self) -> int:
        """Return a handle that is readable once the file has changed again."""
        return self._event

    def has_changed(self) -> bool:
        """Whether the file may have changed since the last call. Call before reading."""
        changed = self._watch is None
        if self._watch is None:
            with suppress(OSError):
                self._watch = _reader().watch(self._path, self._event)
        with suppress(BlockingIOError):
            changed = os.eventfd_read(self._event) > 0
        return changed


def _check_result(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
