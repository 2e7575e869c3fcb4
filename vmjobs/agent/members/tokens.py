"""The token with which one machine joins its pool: asked for when its guest asks, and then renewed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vmjobs.cluster.wire import PoolToken
from vmjobs.errors import Unavailable

#: A token is not replaced more often than this, whatever the clocks say; in seconds.
SHORTEST_LIFE = 10.0


@dataclass
class PoolTokens:
    """What a machine's endpoint gives out. Safe to use from several threads.

    fetch: gets a new token from the service.
    fetched: called after that with the time at which half of its life is over (seconds since 1970).
    """

    fetch: Callable[[], PoolToken]
    fetched: Callable[[float], object]
    _token: PoolToken | None = None
    _due: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self) -> str:
        """The token, a new one if half of the last one's life is over.

        Raises:
            Forbidden: the service gives this machine none.
            Unavailable: it cannot be asked, and the last token is no good any more.
        """
        with self._lock:
            if self._token is not None and time.time() < self._due:
                return self._token.token
            try:
                return self._replace()
            except Unavailable:
                if self._token is None or self._token.expires.timestamp() <= time.time():
                    raise
                return self._token.token

    def renew(self) -> None:
        """Have a new token. Raises as :meth:`get`."""
        with self._lock:
            self._replace()

    def _replace(self) -> str:
        token, now = self.fetch(), time.time()
        self._due = now + max(SHORTEST_LIFE, (token.expires.timestamp() - now) / 2)
        self._token = token
        self.fetched(self._due)
        return token.token
