"""Waiting for events in other threads and processes, and a clock that tests set."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
#: Factor for deadlines: how much slower a busy host is.
PATIENCE = float(os.environ.get("VMJOBS_PATIENCE", "1"))


class Clock:
    """A clock whose time a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def wait_until(
    condition: Callable[[], T | None],
    seconds: float = 60.0,
    what: str | Callable[[], object] = "a condition",
    pause: float = 0.02,
) -> T:
    """Wait until a condition is true, and return what it returned; fail after ``seconds``.

    seconds: on a host that is not busy. what: is waited for, or a function that tells why it has not
    come. pause: in seconds.
    """
    seconds *= PATIENCE
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(
                f"not within {seconds:g} s: {what if isinstance(what, str) else what()}"
            )
        time.sleep(pause)
    return found
