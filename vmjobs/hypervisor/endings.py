"""Records why VMs ended.

The first cause reported for a VM counts: later ones only show how its process was cleaned up.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from vmjobs.hypervisor.base import Ending

#: QEMU's causes of a shutdown (``ShutdownCause`` in its QMP reference).
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
    """Return the cause that one of QEMU's shutdown causes means."""
    return _CAUSES.get(cause, Ending.UNKNOWN)


def of_kernel(status: int, console: Path) -> Ending:
    """Return why a UML kernel ended, from its exit status and its last console lines.

    A panic ends it by SIGABRT. Power-off and restart both end it with 0; the console tells which.
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
    """The end of the console output after its first ``began`` bytes."""
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
    """Why the VMs of this process ended. Safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._changed = threading.Condition()

    def expect(self, name: str) -> None:
        """Start recording for a VM that is about to start."""
        with self._changed:
            self._entries[name] = _Entry()

    def forget(self, name: str) -> None:
        """Discard the record of a VM."""
        with self._changed:
            self._entries.pop(name, None)

    def heard(self, name: str, cause: Ending) -> None:
        """Record the cause of a VM's coming end; only the first one counts."""
        with self._changed:
            entry = self._entries.get(name)
            if entry is not None and entry.cause is None:
                entry.cause = cause

    def over(self, name: str, otherwise: Ending) -> None:
        """Record that a VM has ended. otherwise: its cause, if none is recorded yet."""
        self.heard(name, otherwise)
        with self._changed:
            if entry := self._entries.get(name):
                entry.over = True
                self._changed.notify_all()

    def of(self, name: str, timeout: float) -> Ending:
        """Return why a VM ended; wait ``timeout`` seconds for the end's record."""
        deadline = time.monotonic() + timeout
        with self._changed:
            entry = self._entries.get(name)
            if entry is None:
                return Ending.UNKNOWN
            self._changed.wait_for(lambda: entry.over, deadline - time.monotonic())
            return entry.cause or Ending.UNKNOWN
