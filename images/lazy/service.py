"""Answers the server of a machine's root disk: are these bytes there? See ``hypervisor/nbd_plugin``."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from vmjobs.hypervisor.nbd_plugin import COMPLETE, HEAD, QUESTION, REFUSED, THERE

log = logging.getLogger(__name__)

_BACKLOG: Final = 16


class Growing(Protocol):
    """A file in which bytes are there once they were needed."""

    file: BinaryIO

    def need(self, offset: int, length: int) -> bool:
        """Have bytes there; whether all are."""


@dataclass
class BlockService:
    """One machine's. lost: called when its first connection ends, on which no answer is missing."""

    growing: Growing
    size: int
    lost: Callable[[], object]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: set[socket.socket] = field(default_factory=set)
    _closed: bool = False

    def accept(self, listener: socket.socket) -> None:
        """Serve each connection in a thread of its own, until the listener is closed."""
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
        """Give no more answers."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket, first: bool) -> None:
        with connection, suppress(OSError):
            descriptor = self.growing.file.fileno()
            # Opened anew: what the server does with it is reading.
            reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                socket.send_fds(connection, [HEAD.pack(self.size)], [reader])
            finally:
                os.close(reader)
            while len(question := connection.recv(QUESTION.size, socket.MSG_WAITALL)) == QUESTION.size:
                connection.sendall(self._answer(*QUESTION.unpack(question)))
        with self._lock:
            self._open.discard(connection)
            told = first and not self._closed
        if told:
            self.lost()

    def _answer(self, offset: int, length: int) -> bytes:
        try:
            return COMPLETE if self.growing.need(offset, length) else THERE
        except Exception as error:
            # Who reads gets an error, whatever it is; whoever runs the machine hears which.
            log.warning("%d bytes at %d of a root disk cannot be had: %s", length, offset, error)
            return REFUSED


@contextmanager
def serving(
    path: Path, growing: Growing, size: int, lost: Callable[[], object]
) -> Iterator[BlockService]:
    """Answer at a Unix socket while the context lasts."""
    service = BlockService(growing, size, lost)
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
