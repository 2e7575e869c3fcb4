"""Polls the service for this node's assignment of cluster VMs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vmjobs.agent.background import StoppableLoop
from vmjobs.agent.cluster_vms.assignment_source import AssignmentSource
from vmjobs.cluster.wire import Assignment
from vmjobs.errors import VMJobsError

log = logging.getLogger(__name__)

POLL_SECONDS = 25.0
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0


class AssignmentPoller(StoppableLoop):
    """Polls the service for this node's assignment, by long polling.

    seen: the revision known so far. accept: receives each answer; the first one comes at once.
    """

    def __init__(
        self, source: AssignmentSource, seen: int, accept: Callable[[Assignment], object]
    ) -> None:
        super().__init__()
        self._source, self._seen, self._accept = source, seen, accept

    def run(self) -> None:
        """Poll until :meth:`stop` is called, and the current request has ended."""
        pause, wait, seen = 0.0, 0.0, self._seen
        while not self._stopped:
            try:
                share = self._source.share(seen, wait)
            except VMJobsError as error:
                pause = min(MAX_PAUSE_SECONDS, 2 * pause or FIRST_PAUSE_SECONDS)
                log.warning("no assignment of this node, next request in %.0f s: %s", pause, error)
                self._pause(pause)
                continue
            pause, wait, seen = 0.0, POLL_SECONDS, share.revision
            self._accept(share)
