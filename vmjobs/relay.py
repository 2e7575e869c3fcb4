"""Relays a session's bytes between two local descriptors and a stream of HTTP requests."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from typing import Final, Protocol

from vmjobs.cluster.session import MAX_PIECE, MAX_WAIT
from vmjobs.errors import SessionOver, VMJobsError

log = logging.getLogger(__name__)

#: Poll interval in seconds for a reader that accepts no bytes, and the number of polls until it fails.
LOOK_SECONDS: Final = 10.0
LOOKS: Final = 6


class ByteStream(Protocol):
    """One side of a session: sends and receives bytes by offset.

    Methods raise ``SessionEnded`` once the session has ended, and ``Unavailable`` if the service is
    unreachable.
    """

    def send(self, offset: int, data: bytes, end: bool) -> int:
        """Send bytes that begin at ``offset``; returns the next offset: some may remain unsent.

        end: no more data follows. Repeated calls are harmless.
        """

    def receive(self, offset: int, wait: float) -> tuple[bytes, bool]:
        """The other side's bytes from ``offset`` on, and whether they are the last.

        wait: seconds to wait for the first of them.
        """

    def close(self) -> None:
        """End the session. Never fails: a session without requests of a side expires."""


def relay(
    stream: ByteStream, source: int, sink: int, hang_up: Callable[[], object] | None = None
) -> None:
    """Relay bytes until the other side has ended.

    source: descriptor whose bytes are sent. sink: descriptor for received bytes. hang_up: ends reads
    from ``source``. Without it, a thread may still read there after this has returned.

    Raises:
        SessionEnded, Unavailable: the session ended before the other side closed it, or ``sink``
            accepted no bytes for a minute.
        OSError: ``sink`` is closed.
    """
    talking = threading.Thread(target=_talk, args=(stream, source), name="session-out", daemon=True)
    talking.start()
    try:
        _hear(stream, sink)
    finally:
        if hang_up is not None:
            hang_up()
            talking.join()  # it sends all that it has read before the session ends
        stream.close()


def _hear(stream: ByteStream, sink: int) -> None:
    offset, ended = 0, False
    while not ended:
        data, ended = stream.receive(offset, MAX_WAIT)
        view = memoryview(data)
        while view:
            _await_room(stream, offset, sink)
            view = view[os.write(sink, view[: select.PIPE_BUF]) :]  # this many never block
        offset += len(data)


def _await_room(stream: ByteStream, offset: int, sink: int) -> None:
    """Wait until a descriptor accepts bytes; a hostile reader may never accept any."""
    poller = select.poll()
    poller.register(sink, select.POLLOUT)
    for _ in range(LOOKS):
        if poller.poll(LOOK_SECONDS * 1000):
            return
        stream.receive(
            offset, 0
        )  # returns nothing new, but keeps the session alive, and fails if it has ended
    raise SessionOver(f"the reader accepted no data for {LOOKS * LOOK_SECONDS:.0f} s")


def _talk(stream: ByteStream, source: int) -> None:
    offset = 0
    try:
        while True:
            data = _read(source)
            end = not data
            while data or end:
                reached = stream.send(offset, data, end)
                data, offset = data[reached - offset :], reached
                if end:
                    return
    except VMJobsError as error:
        log.debug("stopped sending: %s", error)  # the other direction raises it


def _read(source: int) -> bytes:
    """Read the available bytes, at least one; empty: the end."""
    data = _piece(source, MAX_PIECE)
    poller = select.poll()
    poller.register(source, select.POLLIN)
    while data and len(data) < MAX_PIECE and poller.poll(0):
        more = _piece(source, MAX_PIECE - len(data))
        if not more:
            break
        data += more
    return data


def _piece(source: int, most: int) -> bytes:
    try:
        return os.read(source, most)
    except OSError:
        return b""
