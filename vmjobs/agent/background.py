"""Work that goes on beside the rest, and ends with the process."""

from __future__ import annotations

import threading
from collections.abc import Callable


def begin(name: str, action: Callable[..., object], *arguments: object) -> None:
    """Do it in a thread of its own.

    Raises:
        RuntimeError: the system starts no more threads.
    """
    threading.Thread(target=action, args=arguments, name=name, daemon=True).start()
