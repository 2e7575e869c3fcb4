"""The token with which one machine joins its pool: asked for when its guest asks, and then renewed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vmjobs.cluster.wire import PoolToken
from vmjobs.errors import Unavailable, VMJobsError

log = logging.getLogger(__name__)

#: A token is not replaced more often than this, whatever the clocks say; in seconds.
SHORTEST_LIFE = 10.0


@dataclass
class PoolTokens:
    """What a machine's endpoint gives out. Safe to use from several threads.

    fetch: gets a new token from the service. That may take its time: it is done in a thread of its own,
        so that nobody needs to wait for it once this is closed.
    fetched: called after that with the time at which half of its life is over (seconds since 1970).
    had: the machine has had a token, be it from an earlier agent.
    refused: called with the reason each time that a machine gets none that never had one.
    """

    fetch: Callable[[], PoolToken]
    fetched: Callable[[float], object]
    had: bool = False
    refused: Callable[[str], object] = lambda _: None
    _token: PoolToken | None = None
    _fault: VMJobsError | None = None
    _due: float = 0.0
    _asking: bool = False
    _closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def get(self) -> str:
        """The token, a new one if half of the last one's life is over.

        Raises:
            Forbidden: the service gives this machine none.
            Unavailable: it cannot be asked, and the last token is no good any more.
        """
        with self._changed:
            if self._token is not None and time.time() < self._due:
                return self._token.token
            try:
                self._replace()
            except Unavailable:
                if self._token is None or self._token.expires.timestamp() <= time.time():
                    raise
            return self._token.token if self._token is not None else ""

    def renew(self) -> None:
        """Have a new token. Raises as :meth:`get`."""
        with self._changed:
            self._replace()

    def close(self) -> None:
        """Let go of all who wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _replace(self) -> None:
        if not self._asking:
            self._asking = True
            threading.Thread(target=self._ask, name="pool-token", daemon=True).start()
        self._changed.wait_for(lambda: self._closed or not self._asking)
        if self._closed:
            raise Unavailable("agent", "this agent is leaving the machine")
        if self._fault is not None:
            raise self._fault

    def _ask(self) -> None:
        token, fault = None, None
        try:
            token = self.fetch()
        except VMJobsError as error:
            fault = error
        except Exception as error:  # or those who wait would wait for ever
            log.exception("no token")
            fault = Unavailable("api", f"the agent failed: {type(error).__name__}")
        with self._changed:
            self._asking, self._fault = False, fault
            if token is not None:
                now = time.time()
                self._due = now + max(SHORTEST_LIFE, (token.expires.timestamp() - now) / 2)
                self._token, self.had = token, True
                self.fetched(self._due)
            elif fault is not None and not self.had:
                self.refused(fault.message)
            self._changed.notify_all()
