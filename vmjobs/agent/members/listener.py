"""What the service says that a node is to have."""

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
    """Asks the service for this node's share, again and again.

    seen: the revision that is known already. take: is told of each answer; the first comes at once.
    """

    def __init__(self, source: ShareSource, seen: int, take: Callable[[NodeShare], object]) -> None:
        self._source, self._seen, self._take = source, seen, take
        self._stop = threading.Event()

    def run(self) -> None:
        """Ask until :meth:`stop` is called."""
        pause, wait, seen = 0.0, 0.0, self._seen
        while not self._stop.is_set():
            try:
                share = self._source.share(seen, wait)
            except VMJobsError as error:
                pause = min(LONGEST_PAUSE, 2 * pause or FIRST_PAUSE)
                log.warning("the share of this node is asked for again in %.0f s: %s", pause, error)
                self._stop.wait(pause)
                continue
            pause, wait, seen = 0.0, POLL_SECONDS, share.revision
            self._take(share)

    def stop(self) -> None:
        """Have :meth:`run` end, after the request that is under way."""
        self._stop.set()
