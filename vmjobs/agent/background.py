"""Background threads, which end with the process, and their loops."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from vmjobs.errors import VMJobsError

log = logging.getLogger(__name__)


def start_thread(name: str, action: Callable[..., object], *arguments: object) -> None:
    """Run ``action`` in a daemon thread.

    Raises:
        RuntimeError: the system cannot start another thread.
    """
    threading.Thread(target=action, args=arguments, name=name, daemon=True).start()


class StoppableLoop:
    """A loop in a thread of its own; ``_changed`` wakes it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due = self._stopped = False

    def wake(self) -> None:
        """End the loop's wait, or the next one if it does not wait now."""
        with self._changed:
            self._due = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Make the loop return."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _await_wake(self, seconds: float | None) -> None:
        """Wait for so many seconds (None: without end), or for :meth:`wake` or :meth:`stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._due or self._stopped, seconds)
            self._due = False


class RetryingLoop(StoppableLoop, ABC):
    """Takes one step after another; after each failure in a row it pauses twice as long.

    purpose: of a step, for the log. first_pause, max_pause: in seconds.
    """

    purpose: str
    first_pause = 0.5
    max_pause = 15.0

    def run(self) -> None:
        """Take steps until :meth:`stop` is called and the current step has ended."""
        pause = 0.0
        while not self._stopped:
            try:
                self.step()
                pause = 0.0
            except (VMJobsError, OSError) as error:
                pause = min(self.max_pause, 2 * pause or self.first_pause)
                log.warning("cannot %s, next attempt in %.1f s: %s", self.purpose, pause, error)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, pause)

    @abstractmethod
    def step(self) -> None:
        """Wait for work, unless there is some, and do it; a failure loses none of it."""
