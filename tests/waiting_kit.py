"""Waiting for what happens in other threads and processes, and a clock that waits for nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Clock:
    """A clock that stands where it is put."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Until something is so; it fails if that does not come to be in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
