"""Gunicorn's threaded worker; a thread keeps its connection while requests follow.

The original returns a connection to its main thread after each request, which polls for the next one
and passes it to a thread again. That costs more than to answer a request for a segment, which the next
one follows on the same connection within a millisecond.

The original also gives a thread to each client that has sent the first byte of a request: a hundred
clients that send the rest byte by byte occupy all of them. Here a request gets a thread when its
headers are complete; until then it costs an open file, for some seconds. A body must come at a modest
pace.
"""

from __future__ import annotations

import math
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from gunicorn import util
from gunicorn.workers.gthread import ThreadWorker

from api.services import services

#: How long a thread waits for its connection's next request, if no request waits for a thread.
LINGER_MILLISECONDS: Final = 5
#: How long all headers together may take to arrive, and how many bytes they may have.
HEADER_SECONDS: Final = 10.0
MAX_HEADERS: Final = 65536
#: How long a body may take to arrive: so many seconds, and one more for each so many bytes.
BODY_SECONDS: Final = 60.0
BODY_RATE: Final = 16384
#: How long the rest of a body that was refused is read, so that its sender sees the answer.
DRAIN_SECONDS: Final = 0.2
#: Connections of one address without complete headers, per process; beyond that the oldest ends.
MAX_INCOMPLETE_CONNECTIONS: Final = 64


class ApiWorker(ThreadWorker):  # type: ignore[misc]
    """A worker; up to half of its threads wait for their connection's next request.

    They wait only a moment. Requests that wait for a thread go first: then a connection gives up its
    thread after each request, as in gunicorn's own worker, and queues.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._queue_lock = threading.Lock()
        self._queued = 0
        self._incomplete: dict[Any, float] = {}  # deadlines, the oldest first
        self._linger_slots = threading.BoundedSemaphore(max(1, self.cfg.threads // 2))

    def handle_exit(self, sig: Any, frame: Any) -> None:
        """Stop quickly: requests that wait for a change are answered at once."""
        super().handle_exit(sig, frame)
        app = getattr(self, "wsgi", None)
        if app is not None:
            services(app).assignments.close()

    def enqueue_req(self, conn: Any) -> None:
        """Queue the connection's next request for a thread, with complete headers."""
        missing = _missing_header_bytes(conn)
        if not missing:
            self._enqueue(conn)
            return
        self._incomplete.setdefault(conn, time.monotonic() + HEADER_SECONDS)
        # The kernel reports when there are more bytes than now, and not before (socket(7)).
        conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, missing)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self._on_more_data, conn))
        mine = [each for each in self._incomplete if _address(each) == _address(conn)]
        if missing > MAX_HEADERS:
            self._abort(conn)
        elif len(mine) > MAX_INCOMPLETE_CONNECTIONS:
            self._abort(mine[0])

    def _on_more_data(self, conn: Any, client: Any) -> None:
        if conn not in self._incomplete:
            return  # aborted just now
        self.poller.unregister(client)
        if _missing_header_bytes(conn) > conn.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT):
            self.enqueue_req(conn)
        else:  # complete, or the client closed early
            self._enqueue(conn)

    def _enqueue(self, conn: Any) -> None:
        if self._incomplete.pop(conn, None) is not None:
            conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._add_queued(1)
        super().enqueue_req(conn)

    def _abort(self, conn: Any) -> None:
        """Let a thread find the connection closed, and clean up."""
        self.poller.unregister(conn.sock)
        with suppress(OSError):
            conn.sock.shutdown(socket.SHUT_RDWR)
        self._enqueue(conn)

    def murder_keepalived(self, *arguments: Any, **more: Any) -> None:
        """Abort connections silent for too long; gunicorn calls this every second."""
        super().murder_keepalived(*arguments, **more)
        now = math.inf if not self.alive else time.monotonic()
        for conn in [conn for conn, until in self._incomplete.items() if until <= now]:
            self._abort(conn)

    def handle(self, conn: Any) -> Any:
        """Handle requests while they follow at once; return gunicorn's last result."""
        self._add_queued(-1)
        answered = self._handle_one(conn)
        while _is_kept(answered) and self._has_next_request(conn):
            answered = self._handle_one(conn)
        return answered

    def _handle_one(self, conn: Any) -> Any:
        conn.sock.setblocking(True)
        conn.init()
        source = conn.parser.unreader
        source.chunk = _BodyDeadline(type(source).chunk.__get__(source))
        # Gunicorn's main thread would wait two seconds for such a client's remaining bytes.
        conn.close = lambda graceful=False: util.close(conn.sock)
        answered = super().handle(conn)
        if not _is_kept(answered):
            _drain(conn.sock)
        return answered

    def _keepalive_after(self, conn: Any, keepalive: Any) -> bool:
        """Whether a next request may come; gunicorn before 27 does not call it."""
        deadline = time.monotonic() + DRAIN_SECONDS
        return bool(keepalive and conn.parser.finish_body(deadline=deadline))

    def _add_queued(self, more: int) -> None:
        with self._queue_lock:
            self._queued += more

    def _has_next_request(self, conn: Any) -> bool:
        """Whether the next request has arrived, and this thread may handle it."""
        if not self.alive or self._queued or not self._linger_slots.acquire(blocking=False):
            return False
        try:
            poll = select.poll()
            poll.register(conn.sock, select.POLLIN)
            return (
                bool(poll.poll(LINGER_MILLISECONDS))
                and not self._queued
                and not _missing_header_bytes(conn)
            )
        finally:
            self._linger_slots.release()


def _drain(client: socket.socket) -> None:
    """Let a client read its answer: closing with unread bytes resets a connection."""
    end = time.monotonic() + DRAIN_SECONDS
    with suppress(OSError):
        client.shutdown(socket.SHUT_WR)
        while (left := end - time.monotonic()) > 0:
            client.settimeout(left)
            if not client.recv(MAX_HEADERS):
                return


class _BodyDeadline:
    """Reads a request's bytes; raises an error when the body arrives too slowly."""

    def __init__(self, read: Callable[..., bytes]) -> None:
        self._read = read
        self._end = time.monotonic() + BODY_SECONDS

    def __call__(self, *size: int) -> bytes:
        if time.monotonic() > self._end:
            raise TimeoutError
        data = self._read(*size)
        self._end += len(data) / BODY_RATE
        return data


def _missing_header_bytes(conn: Any) -> int:
    """Return how many bytes to wait for; 0: the next request's headers are complete."""
    parser = getattr(conn, "parser", None)
    if parser is not None and parser.unreader.buf.getvalue():
        return 0  # it was read together with the previous one
    try:
        begun = conn.sock.recv(MAX_HEADERS, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 1
    except OSError:
        return 0
    return 0 if not begun or b"\r\n\r\n" in begun else len(begun) + 1


def _address(conn: Any) -> str:
    return str(conn.client[0]) if isinstance(conn.client, tuple) else ""


def _is_kept(answered: Any) -> bool:
    """Whether the connection stays open. Releases before 24 return a pair with it."""
    return (answered[0] if isinstance(answered, tuple) else answered) is True
