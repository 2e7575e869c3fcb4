"""Requests that wait for changes of assignments; one thread polls for all of them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from vmjobs.errors import VMJobsError

log = logging.getLogger(__name__)

#: Seconds between polls, while a request waits.
POLL_SECONDS: Final = 0.3


class AssignmentWatch:
    """Wakes requests when a node's revision changes.

    revisions: returns those of some nodes; one small query. limit: requests that may wait at once, of
    the process's threads; further ones are answered at once, and may ask again.
    """

    def __init__(self, revisions: Callable[[Sequence[str]], Mapping[str, int]], limit: int) -> None:
        self._revisions = revisions
        self._limit = limit
        self._changed = threading.Condition()
        self._waiting: Counter[str] = Counter()
        self._known: dict[str, int] = {}
        self._is_polling = self._closed = False

    def wait(self, node: str, seen: int, seconds: float) -> None:
        """Return once the node's revision differs from ``seen``, or ``seconds`` passed.

        Returns at once if too many requests wait.
        """
        with self._changed:
            if self._closed or self._waiting.total() >= self._limit:
                return
            self._waiting[node] += 1
            try:
                if not self._is_polling:
                    self._is_polling = True
                    threading.Thread(target=self._poll, name="shares", daemon=True).start()
                self._changed.wait_for(
                    lambda: self._closed or self._known.get(node, seen) != seen, seconds
                )
            finally:
                self._waiting[node] -= 1
                if not self._waiting[node]:
                    del self._waiting[node]
                    self._known.pop(node, None)

    def close(self) -> None:
        """Have all requests answered soon. Takes no lock: signal handlers call it."""
        self._closed = True

    def _poll(self) -> None:
        pause = threading.Event()
        while True:
            with self._changed:
                nodes = sorted(self._waiting)
                if not nodes:
                    self._is_polling = False
                    return
            found = self._query_revisions(nodes)
            with self._changed:
                self._known.update((n, r) for n, r in found.items() if n in self._waiting)
                self._changed.notify_all()
            pause.wait(POLL_SECONDS)

    def _query_revisions(self, nodes: Sequence[str]) -> Mapping[str, int]:
        try:
            return self._revisions(nodes)
        except VMJobsError as error:
            log.warning("cannot notify nodes of changes for now: %s", error.message)
        except Exception:
            log.exception("cannot query changes of assignments")
        return {}
