"""Polls the service for this node's assignment of cluster VMs."""

from __future__ import annotations

from collections.abc import Callable

from vmjobs.agent.background import RetryingLoop
from vmjobs.agent.cluster_vms.assignment_source import AssignmentSource
from vmjobs.cluster.wire import Assignment

POLL_SECONDS = 25.0


class AssignmentPoller(RetryingLoop):
    """Polls the service for this node's assignment, by long polling.

    seen: the revision known so far. accept: receives each answer; the first one comes at once.
    """

    purpose = "get the assignment of this node"
    first_pause, max_pause = 1.0, 30.0

    def __init__(
        self, source: AssignmentSource, seen: int, accept: Callable[[Assignment], object]
    ) -> None:
        super().__init__()
        self._source, self._seen, self._accept = source, seen, accept
        self._wait = 0.0

    def step(self) -> None:
        assignment = self._source.assignment(self._seen, self._wait)
        self._wait, self._seen = POLL_SECONDS, assignment.revision
        self._accept(assignment)
