"""Background threads, which end with the process."""

from __future__ import annotations

import threading
from collections.abc import Callable


def start_thread(name: str, action: Callable[..., object], *arguments: object) -> None:
    """Run ``action`` in a daemon thread.

    Raises:
        RuntimeError: the system cannot start another thread.
    """
    threading.Thread(target=action, args=arguments, name=name, daemon=True).start()
