"""Waiting for events in other threads and processes, and a clock that tests set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Clock:
    """A clock whose time a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until a condition is true; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
