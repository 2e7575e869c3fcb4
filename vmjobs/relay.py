"""Carries the bytes of a session between two descriptors here and a stream that requests make up."""

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

#: Seconds between two looks whether who takes nothing is ready again, and how many of them are enough.
LOOK_SECONDS: Final = 10.0
LOOKS: Final = 6


class ByteStream(Protocol):
    """One side of a session: what it says to the other, and hears of it, by offset.

    All raise ``SessionOver`` once it has ended, and ``Unavailable`` where the service is out of reach.
    """

    def send(self, offset: int, data: bytes, end: bool) -> int:
        """Say something that begins at ``offset``; where to go on: not all may have been taken.

        end: nothing comes after it. Repeating a call does no harm.
        """

    def receive(self, offset: int, wait: float) -> tuple[bytes, bool]:
        """What the other side says from ``offset`` on, waiting ``wait`` seconds for some of it; and
        whether that is the end."""

    def close(self) -> None:
        """End the session. Repeating it is no error, nor is it to fail: a session ends by itself where
        a side is not heard of."""


def relay(
    stream: ByteStream, source: int, sink: int, hang_up: Callable[[], object] | None = None
) -> None:
    """Carry bytes until the other side has ended.

    source: descriptor whose bytes are sent. sink: gets what comes. hang_up: has reading ``source`` end.
    Without it, a thread may read there after this has returned.

    Raises:
        SessionOver, Unavailable: the session ended before the other side said so, or ``sink`` took
            nothing for a minute.
        OSError: ``sink`` takes nothing any more.
    """
    talking = threading.Thread(target=_talk, args=(stream, source), name="session-out", daemon=True)
    talking.start()
    try:
        _hear(stream, sink)
    finally:
        if hang_up is not None:
            hang_up()
            talking.join()  # what it has read already is heard before the end
        stream.close()


def _hear(stream: ByteStream, sink: int) -> None:
    offset, ended = 0, False
    while not ended:
        data, ended = stream.receive(offset, MAX_WAIT)
        view = memoryview(data)
        while view:
            _await_room(stream, offset, sink)
            view = view[os.write(sink, view[: select.PIPE_BUF]) :]  # so much never blocks
        offset += len(data)


def _await_room(stream: ByteStream, offset: int, sink: int) -> None:
    """Wait until a descriptor takes bytes: a hostile reader may never take any."""
    poller = select.poll()
    poller.register(sink, select.POLLOUT)
    for _ in range(LOOKS):
        if poller.poll(LOOK_SECONDS * 1000):
            return
        stream.receive(
            offset, 0
        )  # nothing new: it says that this side is there, and whether the other is
    raise SessionOver(f"nobody took what was said for {LOOKS * LOOK_SECONDS:.0f} s")


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
        log.debug("nothing more is sent: %s", error)  # the other direction says so aloud


def _read(source: int) -> bytes:
    """Bytes that are there, at least one; none: the end."""
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
