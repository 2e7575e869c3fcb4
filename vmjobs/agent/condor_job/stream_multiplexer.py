"""Multiplexes a guest's connections over one channel of the agent's socket.

The agent accepts the connections, numbers them, and sends their bytes as ``data`` messages; the client
that submitted the job serves them. Both sides use :class:`StreamMultiplexer`, which maps stream
numbers to sockets.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from vmjobs.agent.background import start_thread
from vmjobs.agent.framing import MAX_DATA, Channel, DataMessage
from vmjobs.sockets import shutdown_socket

log = logging.getLogger(__name__)

#: Connections of one guest at a time; further ones are closed.
MAX_CONNECTIONS: Final = 8
#: Bytes that wait for a connection's reader; beyond that the connection is closed.
MAX_PENDING_BYTES: Final = 16 * 1024 * 1024
_READ_BYTES: Final = min(64 * 1024, MAX_DATA)


@dataclass
class _Connection:
    """A socket, and the data to be written to it; None in the queue marks the end.

    open_directions: how many of the two, reading from it and writing to it, have not ended.
    """

    socket: socket.socket
    queue: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    pending_bytes: int = 0
    open_directions: int = 2


@dataclass
class StreamMultiplexer:
    """The open connections of one channel.

    send: sends a message to the other side; safe to call from several threads.
    answer: serves a connection that the other side opens, in a separate thread; None: only this side
        opens connections, by :meth:`begin`.
    """

    channel: Channel
    send: Callable[[DataMessage], object]
    answer: Callable[[socket.socket], object] | None = None
    _open: dict[int, _Connection] = field(default_factory=dict)
    _last_number: int = 0
    closed: bool = False
    _blocked: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, connection: socket.socket) -> None:
        """Carry an accepted connection, or close it at once if there are too many.

        Call it from one thread only: the other side expects connections in the order of their numbers.
        """
        with self._lock:
            if self.closed or self._blocked or len(self._open) >= MAX_CONNECTIONS:
                connection.close()
                return
            self._last_number += 1
            number, opened = self._last_number, _Connection(connection)
            self._open[number] = opened
        with suppress(OSError):  # the other side is gone: nothing will arrive
            self.send(self._message(number))
        self._start_relay(number, opened)

    def take(self, message: DataMessage) -> None:
        """Handle a message of the other side. Never waits; drops data of closed connections."""
        opened = self._open.get(message.stream) or self._open_served(message.stream)
        if opened is None:
            return
        with self._lock:
            opened.pending_bytes += len(message.data)
            flooded = opened.pending_bytes > MAX_PENDING_BYTES
        if flooded:
            log.warning("%s: closing a connection that does not read its data", self.channel)
            shutdown_socket(opened.socket)
            return
        if message.data:
            opened.queue.put(message.data)
        if message.last:
            opened.queue.put(None)

    def shut(self, shut: bool) -> None:
        """While true, close all connections and reject new ones; false: accept them again."""
        with self._lock:
            self._blocked = shut
            left = list(self._open.values()) if shut else []
        for opened in left:
            shutdown_socket(opened.socket)

    def close(self) -> None:
        """Close all connections for good."""
        with self._lock:
            self.closed = True
            left = list(self._open.values())
        for opened in left:
            shutdown_socket(opened.socket)
            opened.queue.put(None)

    def _open_served(self, number: int) -> _Connection | None:
        with self._lock:
            # No limit here: the other side enforces one.
            if self.answer is None or self.closed or number <= self._last_number:
                return None
            self._last_number = number
            near, far = socket.socketpair()
            opened = self._open[number] = _Connection(near)
        start_thread(f"{self.channel}-answer", self._serve, far)
        self._start_relay(number, opened)
        return opened

    def _serve(self, connection: socket.socket) -> None:
        if self.answer is None:
            return
        with connection:
            try:
                self.answer(connection)
            except (OSError, ValueError) as error:
                log.info("%s: %s", self.channel, error)

    def _start_relay(self, number: int, opened: _Connection) -> None:
        start_thread(f"{self.channel}-read", self._read, number, opened)
        start_thread(f"{self.channel}-write", self._write, number, opened)

    def _read(self, number: int, opened: _Connection) -> None:
        """Forward data from a connection until its end."""
        with suppress(OSError):
            while data := opened.socket.recv(_READ_BYTES):
                self.send(self._message(number, data))
        with suppress(OSError):  # the other side is gone
            self.send(self._message(number, last=True))
        self._end_direction(number, opened)

    def _write(self, number: int, opened: _Connection) -> None:
        """Write the other side's data to a connection until its end, or until writing fails."""
        with suppress(OSError):
            while (data := opened.queue.get()) is not None:
                opened.socket.sendall(data)
                with self._lock:
                    opened.pending_bytes -= len(data)
            opened.socket.shutdown(socket.SHUT_WR)
        self._end_direction(number, opened)

    def _end_direction(self, number: int, opened: _Connection) -> None:
        """Note that one direction has ended; after both, close the connection."""
        with self._lock:
            opened.open_directions -= 1
            if opened.open_directions == 0:
                del self._open[number]
                opened.socket.close()

    def _message(self, number: int, data: bytes = b"", *, last: bool = False) -> DataMessage:
        return DataMessage(self.channel, data, stream=number, last=last)


@contextmanager
def listening(streams: StreamMultiplexer, server: socket.socket) -> Iterator[None]:
    """Accept connections of a listening socket while the context lasts."""
    with server:
        thread = threading.Thread(
            target=_accept, args=(server, streams), name=f"{streams.channel}-accept", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            streams.close()
            shutdown_socket(server)  # wakes the thread
            thread.join()


def _accept(server: socket.socket, streams: StreamMultiplexer) -> None:
    while not streams.closed:
        try:
            streams.begin(server.accept()[0])
        except (OSError, RuntimeError) as error:  # too many open files, or threads
            if not streams.closed:
                log.error("%s: cannot accept a connection: %s", streams.channel, error)
                time.sleep(0.1)  # no event signals the end of that
