"""How machines ended: what is heard of each, until somebody asks.

The first cause that is heard of a machine stands: what follows is how its process is cleared away.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from vmjobs.hypervisor.base import Ending

#: What QEMU calls the causes of a shutdown (``ShutdownCause`` in its QMP reference).
_CAUSES = {
    "guest-shutdown": Ending.POWEROFF,
    "guest-reset": Ending.RESET,
    "subsystem-reset": Ending.RESET,
    "guest-panic": Ending.PANICKED,
    "host-error": Ending.CRASHED,
    "host-signal": Ending.KILLED,
    "host-qmp-quit": Ending.KILLED,
    "host-qmp-system-reset": Ending.KILLED,
    "host-ui": Ending.KILLED,
}


def of_cause(cause: str) -> Ending:
    """The ending that QEMU means by a cause of shutdown."""
    return _CAUSES.get(cause, Ending.UNKNOWN)


def of_kernel(status: int, console: Path) -> Ending:
    """How a UML kernel ended, from its exit status and from what it said last.

    A panic ends it by SIGABRT; power-off and restart both by 0, but not without saying which.
    """
    if status == -signal.SIGABRT:
        return Ending.PANICKED
    if status in {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}:
        return Ending.KILLED
    if status:
        return Ending.CRASHED
    last = tail(console).rpartition(b"reboot: ")[2]
    if last.startswith((b"Power down", b"System halted")):
        return Ending.POWEROFF
    return Ending.RESET if last.startswith(b"Restarting system") else Ending.UNKNOWN


def tail(console: Path, began: int = 0) -> bytes:
    """The end of what was added to a console after its first ``began`` bytes."""
    try:
        with console.open("rb") as file:
            file.seek(max(began, file.seek(0, os.SEEK_END) - 2000))
            return file.read()
    except OSError:
        return b""


@dataclass
class _Entry:
    cause: Ending | None = None
    over: bool = False


class Endings:
    """The endings of the machines that this process started. Safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._changed = threading.Condition()

    def expect(self, name: str) -> None:
        """A machine is about to start: listen for its end."""
        with self._changed:
            self._entries[name] = _Entry()

    def forget(self, name: str) -> None:
        """Nobody will ask for this machine any more."""
        with self._changed:
            self._entries.pop(name, None)

    def heard(self, name: str, cause: Ending) -> None:
        """A machine is about to end, for this cause."""
        with self._changed:
            entry = self._entries.get(name)
            if entry is not None and entry.cause is None:
                entry.cause = cause

    def over(self, name: str, otherwise: Ending) -> None:
        """A machine has ended; ``otherwise`` says how, where no cause was heard before."""
        self.heard(name, otherwise)
        with self._changed:
            if entry := self._entries.get(name):
                entry.over = True
                self._changed.notify_all()

    def of(self, name: str, timeout: float) -> Ending:
        """How a machine ended; waits for the word, which may come after the end itself."""
        deadline = time.monotonic() + timeout
        with self._changed:
            entry = self._entries.get(name)
            if entry is None:
                return Ending.UNKNOWN
            self._changed.wait_for(lambda: entry.over, deadline - time.monotonic())
            return entry.cause or Ending.UNKNOWN
