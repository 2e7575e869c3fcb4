"""Background threads, which end with the process, and their loops."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
        self._stopped = False

    def stop(self) -> None:
        """Make the loop return."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        """Wait for so many seconds, or for :meth:`stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, seconds)
