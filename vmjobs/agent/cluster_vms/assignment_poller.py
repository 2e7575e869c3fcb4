"""Polls the service for this node's assignment of cluster VMs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from vmjobs.agent.cluster_vms.assignment_source import AssignmentSource
from vmjobs.cluster.wire import Assignment
from vmjobs.errors import VMJobsError

log = logging.getLogger(__name__)

POLL_SECONDS = 25.0
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0


class AssignmentPoller:
    """Polls the service for this node's assignment, by long polling.

    seen: the revision known so far. accept: receives each answer; the first one comes at once.
    """

    def __init__(
        self, source: AssignmentSource, seen: int, accept: Callable[[Assignment], object]
    ) -> None:
        self._source, self._seen, self._accept = source, seen, accept
        self._stop = threading.Event()

    def run(self) -> None:
        """Poll until :meth:`stop` is called."""
        pause, wait, seen = 0.0, 0.0, self._seen
        while not self._stop.is_set():
            try:
                share = self._source.share(seen, wait)
            except VMJobsError as error:
                pause = min(MAX_PAUSE_SECONDS, 2 * pause or FIRST_PAUSE_SECONDS)
                log.warning("no assignment of this node, next request in %.0f s: %s", pause, error)
                self._stop.wait(pause)
                continue
            pause, wait, seen = 0.0, POLL_SECONDS, share.revision
            self._accept(share)

    def stop(self) -> None:
        """Make :meth:`run` return after the current request."""
        self._stop.set()
