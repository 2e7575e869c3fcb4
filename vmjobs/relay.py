"""Relays a session's bytes between two local descriptors and a stream of HTTP requests."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from typing import Final, Protocol

from vmjobs.cluster.ssh_session import MAX_PIECE_BYTES, MAX_WAIT_SECONDS
from vmjobs.errors import SessionEnded, VMJobsError

log = logging.getLogger(__name__)

#: Poll interval in seconds for a reader that accepts no bytes, and the number of polls until it fails.
POLL_SECONDS: Final = 10.0
MAX_POLLS: Final = 6


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
    sender = threading.Thread(target=_send_all, args=(stream, source), name="session-out", daemon=True)
    sender.start()
    try:
        _receive_all(stream, sink)
    finally:
        if hang_up is not None:
            hang_up()
            sender.join()  # it sends all that it has read before the session ends
        stream.close()


def _receive_all(stream: ByteStream, sink: int) -> None:
    offset, ended = 0, False
    while not ended:
        data, ended = stream.receive(offset, MAX_WAIT_SECONDS)
        view = memoryview(data)
        while view:
            _wait_writable(stream, offset, sink)
            view = view[os.write(sink, view[: select.PIPE_BUF]) :]  # this many never block
        offset += len(data)


def _wait_writable(stream: ByteStream, offset: int, sink: int) -> None:
    """Wait until a descriptor accepts bytes; a hostile reader may never accept any."""
    poller = select.poll()
    poller.register(sink, select.POLLOUT)
    for _ in range(MAX_POLLS):
        if poller.poll(POLL_SECONDS * 1000):
            return
        # It returns nothing new, but keeps the session alive, and fails if the session has ended.
        stream.receive(offset, 0)
    raise SessionEnded(f"the reader accepted no data for {MAX_POLLS * POLL_SECONDS:.0f} s")


def _send_all(stream: ByteStream, source: int) -> None:
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
    data = _read_some(source, MAX_PIECE_BYTES)
    poller = select.poll()
    poller.register(source, select.POLLIN)
    while data and len(data) < MAX_PIECE_BYTES and poller.poll(0):
        more = _read_some(source, MAX_PIECE_BYTES - len(data))
        if not more:
            break
        data += more
    return data


def _read_some(source: int, most: int) -> bytes:
    try:
        return os.read(source, most)
    except OSError:
        return b""
