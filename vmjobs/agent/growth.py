"""Tells that a file has changed, whoever writes there (inotify(7))."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_libc = ctypes.CDLL(None, use_errno=True)
_IN_MODIFY = 0x2
#: Watch, mask, cookie, length of a name, of which there is none where files are watched.
_EVENT = struct.Struct("iIII")


class _Notifier:
    """All watches of this process: a user may have few of what the kernel tells of them by."""

    def __init__(self) -> None:
        self._handle = _checked(_libc.inotify_init1(os.O_CLOEXEC))
        self._told: dict[int, int] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="growth", daemon=True).start()

    def watch(self, path: Path, told: int) -> int:
        """Add to the event ``told`` whenever the file changes; the number of the watch.

        Raises:
            OSError: there is no such file, or no other may be watched.
        """
        with self._lock:
            watch = _checked(_libc.inotify_add_watch(self._handle, os.fsencode(path), _IN_MODIFY))
            self._told[watch] = told
            return watch

    def forget(self, watch: int) -> None:
        """Its event is not added to any more."""
        with self._lock:
            del self._told[watch]
            _libc.inotify_rm_watch(self._handle, watch)  # which fails where the file is gone

    def _run(self) -> None:
        while True:
            for watch, *_ in _EVENT.iter_unpack(os.read(self._handle, 256 * _EVENT.size)):
                with self._lock:
                    if (told := self._told.get(watch)) is not None:
                        os.eventfd_write(told, 1)


_creating = threading.Lock()


def _notifier() -> _Notifier:
    with _creating:  # a cache alone may be filled twice, by two threads
        return _only_notifier()


@functools.cache
def _only_notifier() -> _Notifier:
    return _Notifier()


class Growth:
    """Watches a file, which nobody else in this process does, for as long as the context lasts.

    A file that is not there yet, or cannot be watched, is taken for one that changes all the time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watch: int | None = None

    def __enter__(self) -> Self:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        if self._watch is not None:
            _notifier().forget(self._watch)
        os.close(self._event)

    def fileno(self) -> int:
        """A handle that is readable once the file has changed since :meth:`seen` was called."""
        return self._event

    def seen(self) -> bool:
        """Whether it has changed since the last call, or may have; to be called before it is read."""
        changed = self._watch is None
        if self._watch is None:
            with suppress(OSError):
                self._watch = _notifier().watch(self._path, self._event)
        with suppress(BlockingIOError):
            changed = os.eventfd_read(self._event) > 0
        return changed


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
