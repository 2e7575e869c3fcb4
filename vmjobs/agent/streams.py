"""Connections that a guest makes, carried as ``data`` messages of one channel over the agent's socket.

The agent takes the connections and numbers them; whoever handed the job over answers them. Both sides
use :class:`Streams`: a number there, a socket here.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vmjobs.agent.protocol import MAX_DATA, Channel, DataMessage
from vmjobs.hypervisor.mconsole import short_path

log = logging.getLogger(__name__)

#: Connections of one guest at a time; more are hung up on.
MOST: Final = 8
_PIECE: Final = min(64 * 1024, MAX_DATA)


@dataclass
class Streams:
    """The connections of one channel that are open.

    send: a message to the other side; safe to call from several threads.
    answer: serves a connection of whose number nothing is known yet, in a thread of its own; None:
        there are none but those of :meth:`begin`.
    """

    channel: Channel
    send: Callable[[DataMessage], object]
    answer: Callable[[socket.socket], object] | None = None
    _open: dict[int, socket.socket] = field(default_factory=dict)
    _last: int = 0
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, connection: socket.socket) -> None:
        """Carry a connection that somebody made. It is closed at once where there are too many.

        To be called from one thread: the other side hears of connections in the order of their numbers.
        """
        with self._lock:
            if self._closed or len(self._open) >= MOST:
                connection.close()
                return
            self._last += 1
            number = self._last
            self._open[number] = connection
        with suppress(OSError):  # nobody is there to be told: nothing is going to come
            self.send(self._message(number))
        self._start("stream", self._carry, number, connection)

    def take(self, message: DataMessage) -> None:
        """The other side has sent this. Of a connection that is gone, it is dropped."""
        connection = self._open.get(message.stream) or self._answered(message.stream)
        if connection is None:
            return
        with suppress(OSError):  # it hung up: the thread that reads of it tells
            if message.data:
                connection.sendall(message.data)
            if message.last:
                connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Hang up on all."""
        with self._lock:
            self._closed = True
            for connection in self._open.values():
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _answered(self, number: int) -> socket.socket | None:
        with self._lock:
            # There is no limit here: the other side has one.
            if self.answer is None or self._closed or number <= self._last:
                return None
            self._last = number
            near, far = socket.socketpair()
            self._open[number] = near
        self._start("answer", self._serve, far)
        self._start("stream", self._carry, number, near)
        return near

    def _serve(self, connection: socket.socket) -> None:
        if self.answer is None:
            return
        with connection:
            try:
                self.answer(connection)
            except (OSError, ValueError) as error:
                log.info("%s: %s", self.channel, error)

    def _carry(self, number: int, connection: socket.socket) -> None:
        """Send on what comes of a connection, until nothing does."""
        with connection:
            try:
                while data := connection.recv(_PIECE):
                    self.send(self._message(number, data))
            except OSError as error:
                log.info("%s: %s", self.channel, error)
            with self._lock:
                del self._open[number]
        with suppress(OSError):  # nobody is there to be told
            self.send(self._message(number, last=True))

    def _message(self, number: int, data: bytes = b"", *, last: bool = False) -> DataMessage:
        return DataMessage(channel=self.channel, stream=number, size=len(data), last=last, data=data)

    def _start(self, name: str, work: Callable[..., None], *words: object) -> None:
        threading.Thread(target=work, args=words, name=f"{self.channel}-{name}", daemon=True).start()


@contextmanager
def listening(streams: Streams, path: Path) -> Iterator[None]:
    """Take connections on a Unix socket for as long as the context lasts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        with short_path(path) as address:
            server.bind(address)
        path.chmod(0o600)
        server.listen(MOST)
        thread = threading.Thread(
            target=_accept, args=(server, streams), name=f"{streams.channel}-accept", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            with suppress(OSError):  # wakes the thread
                server.shutdown(socket.SHUT_RDWR)
            thread.join()
            streams.close()
            path.unlink(missing_ok=True)


def _accept(server: socket.socket, streams: Streams) -> None:
    with suppress(OSError):
        while True:
            streams.begin(server.accept()[0])
