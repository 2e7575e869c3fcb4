"""Gets a cluster VM's token for its pool when the guest asks for it, and renews it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vmjobs.agent.background import start_thread
from vmjobs.cluster.wire import PoolToken
from vmjobs.errors import Unavailable, VMJobsError

log = logging.getLogger(__name__)

#: Minimum seconds until a token is replaced, even with wrong clocks.
MIN_LIFE_SECONDS = 10.0


@dataclass
class PoolTokenCache:
    """Caches a cluster VM's pool token for the guest endpoint. Thread-safe.

    fetch: gets a new token from the service. Slow, so it runs in a separate thread: :meth:`close` ends
        all waiting for it.
    on_renewed: called after that with the time at which half of the token's life is over (epoch).
    had: the VM has had a token, perhaps from an earlier agent.
    on_refused: called with the reason of each refusal, until the VM has had a token.
    """

    fetch: Callable[[], PoolToken]
    on_renewed: Callable[[float], object]
    had: bool = False
    on_refused: Callable[[str], object] = lambda _: None
    _token: PoolToken | None = None
    _fault: VMJobsError | None = None
    _due: float = 0.0
    _asking: bool = False
    _closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def get(self) -> str:
        """Return the token, a new one if half of the last one's life is over.

        Raises:
            Forbidden: the service refuses this VM a token.
            Unavailable: the service cannot be reached, and the last token has expired.
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
        """Get a new token. Raises as :meth:`get`."""
        with self._changed:
            self._replace()

    def close(self) -> None:
        """Release all waiting threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _replace(self) -> None:
        if not self._asking:
            self._asking = True
            start_thread("pool-token", self._ask)
        self._changed.wait_for(lambda: self._closed or not self._asking)
        if self._closed:
            raise Unavailable("agent", "this agent no longer serves the VM")
        if self._fault is not None:
            raise self._fault

    def _ask(self) -> None:
        token, fault = None, None
        try:
            token = self.fetch()
        except VMJobsError as error:
            fault = error
        except Exception as error:  # otherwise the waiting threads would never return
            log.exception("cannot get a pool token")
            fault = Unavailable("api", f"the agent failed: {type(error).__name__}")
        with self._changed:
            self._asking, self._fault = False, fault
            if token is not None:
                now = time.time()
                self._due = now + max(MIN_LIFE_SECONDS, (token.expires.timestamp() - now) / 2)
                self._token, self.had = token, True
                self.on_renewed(self._due)
            elif fault is not None and not self.had:
                self.on_refused(fault.message)
            self._changed.notify_all()
