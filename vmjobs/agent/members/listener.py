"""Polls the service for this node's assignment of cluster VMs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from vmjobs.cluster.wire import NodeShare
from vmjobs.errors import VMJobsError
from vmjobs.ports import ShareSource

log = logging.getLogger(__name__)

POLL_SECONDS = 25.0
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0


class Listener:
    """Polls the service for this node's assignment, by long polling.

    seen: the revision known so far. accept: receives each answer; the first one comes at once.
    """

    def __init__(self, source: ShareSource, seen: int, take: Callable[[NodeShare], object]) -> None:
        self._source, self._seen, self._take = source, seen, take
        self._stop = threading.Event()

    def run(self) -> None:
        """Poll until :meth:`stop` is called."""
        pause, wait, seen = 0.0, 0.0, self._seen
        while not self._stop.is_set():
            try:
                share = self._source.share(seen, wait)
            except VMJobsError as error:
                pause = min(LONGEST_PAUSE, 2 * pause or FIRST_PAUSE)
                log.warning("no assignment of this node, next request in %.0f s: %s", pause, error)
                self._stop.wait(pause)
                continue
            pause, wait, seen = 0.0, POLL_SECONDS, share.revision
            self._take(share)

    def stop(self) -> None:
        """Make :meth:`run` return after the current request."""
        self._stop.set()
