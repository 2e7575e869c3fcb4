"""One thread in which the sockets of all guests are listened to."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from socket import socket as Socket
from typing import Any, Final, TypeVar

from vmjobs.agent.background import begin

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds until connections are taken again after that failed: nothing tells when files can be opened.
_AGAIN_SECONDS: Final = 0.1

_loops: list[asyncio.AbstractEventLoop] = []
_making = threading.Lock()


def guest_loop() -> asyncio.AbstractEventLoop:
    """Its event loop. What is called there must not wait."""
    with _making:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            begin("guests", _loops[0].run_forever)
    return _loops[0]


def in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in that loop, from another thread, and return its result."""
    return asyncio.run_coroutine_threadsafe(work, guest_loop()).result()


class Connections:
    """Connections that programs in one guest have made to one socket. For the loop's thread alone.

    attend: serves one, which is closed when it returns. most: at so many the oldest has to go that is
    not :meth:`known` to be the guest's own, so that others cannot keep the guest out.
    """

    def __init__(self, attend: Callable[[Socket], Coroutine[Any, Any, None]], most: int) -> None:
        self._attend, self._most = attend, most
        self._tasks: dict[Socket, asyncio.Task[None]] = {}
        self._strangers: dict[Socket, None] = {}  # the oldest first
        self._given: set[Socket] = set()

    def take(self, connection: Socket) -> None:
        """Serve a new connection."""
        connection.setblocking(False)
        task = self._tasks[connection] = guest_loop().create_task(self._attend(connection))
        self._strangers[connection] = None
        task.add_done_callback(partial(self._ended, connection))
        if len(self._tasks) > self._most:
            oldest = next(iter(self._strangers))
            self.known(oldest)
            self._tasks[oldest].cancel()

    def known(self, connection: Socket) -> None:
        """It is the guest that has connected."""
        self._strangers.pop(connection, None)

    def hang_up(self, connection: Socket) -> None:
        """Serve it no longer."""
        self._tasks[connection].cancel()

    async def give(self, connection: Socket) -> None:
        """Stop serving a connection and leave it open for the caller, unless it is closed already."""
        if connection in self._tasks:
            self._given.add(connection)
            await self._cancel(connection)

    async def close(self, seconds: float = 0.0) -> None:
        """Hang up on all; on those of the guest's own after so many seconds."""
        await self._cancel(*self._strangers)
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
            log.error("a guest's connection is closed", exc_info=error)
        del self._tasks[connection]
        self.known(connection)
        if connection in self._given:
            self._given.discard(connection)
        else:
            connection.close()


@contextmanager
def accepting(server: Socket, connections: Connections) -> Iterator[None]:
    """Have a listening socket's connections taken for as long as the context lasts."""

    async def accept() -> None:
        while True:
            try:
                connections.take((await guest_loop().sock_accept(server))[0])
                await asyncio.sleep(0)  # a flood of connections does not stop other guests
            except OSError as error:
                log.error("a guest's connection cannot be taken: %s", error)
                await asyncio.sleep(_AGAIN_SECONDS)

    with server:
        server.setblocking(False)
        accepts = asyncio.run_coroutine_threadsafe(accept(), guest_loop())
        try:
            yield
        finally:
            accepts.cancel()
            in_loop(connections.close())
