"""Gunicorn's threaded worker, whose threads stay with a connection while requests keep coming.

By itself it hands a connection back to its main thread after each request, to be told by the
kernel when there is another and to hand it to a thread again. That costs more than to answer a
request for a segment, whose next one follows on the same connection within a millisecond.
"""

from __future__ import annotations

import select
import threading
from typing import Any, Final

from gunicorn.workers.gthread import ThreadWorker

from api.services import services

#: How long a thread waits for its connection's next request, while nobody else waits for a thread.
LINGER_MILLISECONDS: Final = 5


class Worker(ThreadWorker):  # type: ignore[misc]
    """At most half of the threads wait for their connection's next request, and only for a moment.

    Whoever waits for a thread goes first: then a connection gives its thread back after each
    request, as in gunicorn's own worker, and stands in line.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._line_lock = threading.Lock()
        self._in_line = 0
        self._may_linger = threading.BoundedSemaphore(max(1, self.cfg.threads // 2))

    def handle_exit(self, sig: Any, frame: Any) -> None:
        """Stop; whoever waits for a change is answered, so that stopping does not wait for him."""
        super().handle_exit(sig, frame)
        app = getattr(self, "wsgi", None)
        if app is not None:
            services(app).shares.close()

    def enqueue_req(self, conn: Any) -> None:
        """Have a thread handle the connection's next request."""
        self._count(1)
        super().enqueue_req(conn)

    def handle(self, conn: Any) -> Any:
        """Handle requests, as long as they come one upon the other; what gunicorn says of the last."""
        self._count(-1)
        answered = super().handle(conn)
        while _is_kept(answered) and self._next_is_here(conn):
            answered = super().handle(conn)
        return answered

    def _count(self, more: int) -> None:
        with self._line_lock:
            self._in_line += more

    def _next_is_here(self, conn: Any) -> bool:
        """Whether the next request has come, and this thread is free to handle it."""
        if not self.alive or self._in_line or not self._may_linger.acquire(blocking=False):
            return False
        try:
            poll = select.poll()
            poll.register(conn.sock, select.POLLIN)
            return bool(poll.poll(LINGER_MILLISECONDS)) and not self._in_line
        finally:
            self._may_linger.release()


def _is_kept(answered: Any) -> bool:
    """Whether the connection stays open. Releases before 24 say so in a pair, with the connection."""
    return (answered[0] if isinstance(answered, tuple) else answered) is True
