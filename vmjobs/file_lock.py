"""Exclusive locks by flock(2): free once the last process that has the file open has ended."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vmjobs.errors import VMJobsError

POLL_SECONDS = 0.05


@contextmanager
def file_lock(path: Path, taken: VMJobsError, patience: float = 0.0) -> Iterator[int]:
    """Hold the lock of a file, which is created if it is missing; yield its descriptor.

    patience: seconds to wait for the lock. Raises ``taken`` if it is still held elsewhere then.
    """
    deadline = time.monotonic() + patience
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise taken from None
            time.sleep(POLL_SECONDS)  # flock(2) has no timeout
        yield file.fileno()
