"""Fetches bytes of a root disk on request of its server (``hypervisor/nbd_plugin``)."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from images.cache.lazy_fetch import LazyFetch
from vmjobs.hypervisor.libvirt.nbd_plugin import COMPLETE, HEADER, PRESENT, REQUEST, UNAVAILABLE

log = logging.getLogger(__name__)

_BACKLOG: Final = 16


@dataclass
class RootDiskService:
    """Serves one VM's root disk.

    on_disconnect: called when the disk server's first connection, which has no requests, ends.
    """

    fetch: LazyFetch
    on_disconnect: Callable[[], object]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: set[socket.socket] = field(default_factory=set)
    _closed: bool = False

    def accept(self, listener: socket.socket) -> None:
        """Serve each connection in its own thread, until the listener is closed."""
        first = True
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(connection)
            arguments = (connection, first)
            threading.Thread(target=self._serve, args=arguments, name="blocks", daemon=True).start()
            first = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket, first: bool) -> None:
        with connection, suppress(OSError):
            descriptor = self.fetch.file.fileno()
            # A new, read-only open of the file: the server must not write to it.
            reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                socket.send_fds(connection, [HEADER.pack(self.fetch.layout.size)], [reader])
            finally:
                os.close(reader)
            while len(question := connection.recv(REQUEST.size, socket.MSG_WAITALL)) == REQUEST.size:
                connection.sendall(self._answer(*REQUEST.unpack(question)))
        with self._lock:
            self._open.discard(connection)
            is_lost = first and not self._closed
        if is_lost:
            self.on_disconnect()

    def _answer(self, offset: int, length: int) -> bytes:
        try:
            return COMPLETE if self.fetch.ensure(offset, length) else PRESENT
        except Exception as error:
            # The guest gets an I/O error for every cause; the log names the cause.
            log.warning("cannot provide %d bytes at %d of a root disk: %s", length, offset, error)
            return UNAVAILABLE


@contextmanager
def serve_disk(
    path: Path, fetch: LazyFetch, on_disconnect: Callable[[], object]
) -> Iterator[RootDiskService]:
    """Serve the disk at a Unix socket while the context lasts."""
    service = RootDiskService(fetch, on_disconnect)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
        thread = threading.Thread(target=service.accept, args=(listener,), name="blocks", daemon=True)
        thread.start()
        try:
            yield service
        finally:
            service.close()
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            thread.join(10)
            path.unlink(missing_ok=True)
