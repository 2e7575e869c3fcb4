"""Fetches images that the repository wants on this node before a job needs them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from vmjobs.agent.background import StoppableLoop
from vmjobs.agent.image_source import ImageSource
from vmjobs.errors import VMJobsError
from vmjobs.wire import NodeWishes

log = logging.getLogger(__name__)

#: Seconds between two attempts to fetch an image: the first pause and the longest.
FIRST_PAUSE_SECONDS = 60.0
MAX_PAUSE_SECONDS = 3600.0


class _PrefetchStopped(Exception):
    """The agent stops."""


class Prefetcher(StoppableLoop):
    """Fetches one image after the other, in the order of the repository's list.

    A failed fetch (the disk is full of images in use, the repository is down) is logged and
    retried later. The image source never evicts an image in use for another.
    """

    def __init__(self, images: ImageSource) -> None:
        super().__init__()
        self._images = images
        self._wanted: tuple[str, ...] = ()
        #: Of failed images: the monotonic time of the next attempt, and the pause before it.
        self._retries: dict[str, tuple[float, float]] = {}

    def set_wanted(self, node_wishes: NodeWishes) -> None:
        with self._changed:
            self._wanted = node_wishes.prefetch
            self._retries = {d: when for d, when in self._retries.items() if d in node_wishes.prefetch}
        self.wake()

    def run(self, fetched: Callable[[], object]) -> None:
        """Fetch wanted images until :meth:`stop` is called; call ``fetched`` after each one.

        The next agent resumes a fetch that is under way then.
        """
        while not self._stopped:
            self._await_wake(self.step(time.monotonic(), fetched))

    def step(self, now: float, fetched: Callable[[], object]) -> float | None:
        """Fetch the next due image. Return seconds until the next one, ``None`` without one."""
        with self._changed:
            due = {d: self._retries.get(d, (now, 0.0))[0] for d in self._wanted}
        if not due:
            return None
        digest = min(due, key=lambda d: due[d])
        if due[digest] > now:
            return due[digest] - now
        if self._fetch(digest):
            fetched()
        return 0

    def _fetch(self, digest: str) -> bool:
        """Fetch an image; return whether it is newly on this node."""
        try:
            here = digest in self._images.cached()
            if not here:
                log.info("prefetching the image %s", digest)
                self._images.prepare(digest, self._check)
        except _PrefetchStopped:
            return False
        except (VMJobsError, OSError) as error:
            self._postpone(digest, error)
            return False
        with self._changed:
            self._wanted = tuple(d for d in self._wanted if d != digest)
        return not here

    def _postpone(self, digest: str, error: Exception) -> None:
        with self._changed:
            _, before = self._retries.get(digest, (0.0, 0.0))
            pause = min(2 * before, MAX_PAUSE_SECONDS) or FIRST_PAUSE_SECONDS
            self._retries[digest] = (time.monotonic() + pause, pause)
        log.warning("the image %s was not prefetched, next try in %.0f s: %s", digest, pause, error)

    def _check(self, _done: int, _total: int) -> None:
        if self._stopped:
            raise _PrefetchStopped
