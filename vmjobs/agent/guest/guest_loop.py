"""The event loop for the sockets of all guests, in one thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from socket import socket as Socket
from typing import Any, Final, TypeVar

from vmjobs.agent.background import start_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds after a failed accept(2) until the next: no event announces that files can be opened again.
_RETRY_SECONDS: Final = 0.1

_loops: list[asyncio.AbstractEventLoop] = []
_creation_lock = threading.Lock()


def guest_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop. Code that runs in it must not block."""
    with _creation_lock:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            start_thread("guests", _loops[0].run_forever)
    return _loops[0]


def in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the loop, from another thread, and return its result."""
    return asyncio.run_coroutine_threadsafe(work, guest_loop()).result()


class Connections:
    """Connections of programs in one guest to one socket. For the loop's thread only.

    serve_connection: its connection is closed when it returns. limit: beyond this number the oldest
    unidentified connection is closed (see :meth:`mark_identified`), so that other programs cannot keep
    the guest program out.
    """

    def __init__(
        self, serve_connection: Callable[[Socket], Coroutine[Any, Any, None]], limit: int
    ) -> None:
        self._serve_connection, self._limit = serve_connection, limit
        self._tasks: dict[Socket, asyncio.Task[None]] = {}
        self._unidentified: dict[Socket, None] = {}  # the oldest first
        self._released: set[Socket] = set()

    def serve(self, connection: Socket) -> None:
        connection.setblocking(False)
        task = self._tasks[connection] = guest_loop().create_task(self._serve_connection(connection))
        self._unidentified[connection] = None
        task.add_done_callback(partial(self._ended, connection))
        if len(self._tasks) > self._limit:
            oldest = next(iter(self._unidentified))
            self.mark_identified(oldest)
            self._tasks[oldest].cancel()

    def mark_identified(self, connection: Socket) -> None:
        """Note that the connection is the guest program's own."""
        self._unidentified.pop(connection, None)

    def hang_up(self, connection: Socket) -> None:
        self._tasks[connection].cancel()

    async def release(self, connection: Socket) -> None:
        """Stop serving a connection and leave it open for the caller."""
        if connection in self._tasks:
            self._released.add(connection)
            await self._cancel(connection)

    async def close(self, seconds: float = 0.0) -> None:
        """Close all connections; identified ones get so many seconds to end."""
        await self._cancel(*self._unidentified)
        if self._tasks and seconds:
            await asyncio.wait(self._tasks.values(), timeout=seconds)
        await self._cancel(*self._tasks)

    async def _cancel(self, *connections: Socket) -> None:
        tasks = [self._tasks[connection] for connection in connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, connection: Socket, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a guest's connection failed and is closed", exc_info=error)
        del self._tasks[connection]
        self.mark_identified(connection)
        if connection in self._released:
            self._released.discard(connection)
        else:
            connection.close()


@contextmanager
def accepting(server: Socket, connections: Connections) -> Iterator[None]:
    """Accept a listening socket's connections while the context lasts."""

    async def accept() -> None:
        while True:
            try:
                connections.serve(server.accept()[0])
                await asyncio.sleep(0)  # a flood of connections must not stop other guests
            except BlockingIOError:
                await _wait_readable(server)
            except OSError as error:
                log.error("cannot accept a guest's connection: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)

    with server:
        server.setblocking(False)
        accepts = asyncio.run_coroutine_threadsafe(accept(), guest_loop())
        try:
            yield
        finally:
            accepts.cancel()
            in_loop(connections.close())


async def _wait_readable(server: Socket) -> None:
    """Wait for a connection. A canceled sock_accept() may lose one, and leave it open."""
    is_readable = asyncio.Event()
    guest_loop().add_reader(server, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        guest_loop().remove_reader(server)
