"""Records why VMs ended.

The first cause reported for a VM counts: later ones only show how its process was cleaned up.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vmjobs.hypervisor.base import ShutdownCause

#: QEMU's causes of a shutdown (``ShutdownCause`` in its QMP reference).
_CAUSES = {
    "guest-shutdown": ShutdownCause.POWEROFF,
    "guest-reset": ShutdownCause.RESET,
    "subsystem-reset": ShutdownCause.RESET,
    "guest-panic": ShutdownCause.PANICKED,
    "host-error": ShutdownCause.CRASHED,
    "host-signal": ShutdownCause.KILLED,
    "host-qmp-quit": ShutdownCause.KILLED,
    "host-qmp-system-reset": ShutdownCause.KILLED,
    "host-ui": ShutdownCause.KILLED,
}


def cause_from_qemu(cause: str) -> ShutdownCause:
    """Return the cause that one of QEMU's shutdown causes means."""
    return _CAUSES.get(cause, ShutdownCause.UNKNOWN)


def cause_from_uml_exit(status: int, console: Path) -> ShutdownCause:
    """Return why a UML kernel ended, from its exit status and its last console lines.

    A panic ends it by SIGABRT. Power-off and restart both end it with 0; the console tells which.
    """
    if status == -signal.SIGABRT:
        return ShutdownCause.PANICKED
    if status in {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}:
        return ShutdownCause.KILLED
    if status:
        return ShutdownCause.CRASHED
    last = read_tail(console).rpartition("reboot: ")[2]
    if last.startswith(("Power down", "System halted")):
        return ShutdownCause.POWEROFF
    return ShutdownCause.RESET if last.startswith("Restarting system") else ShutdownCause.UNKNOWN


def read_tail(log: Path, began: int = 0) -> str:
    """The end of a console's output, or of a log, after its first ``began`` bytes."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(began, file.seek(0, os.SEEK_END) - 2000))
        return file.read().decode("utf-8", "replace")
    return ""


@dataclass
class _Entry:
    cause: ShutdownCause | None = None
    ended: bool = False


class ShutdownCauses:
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

    def record_cause(self, name: str, cause: ShutdownCause) -> None:
        """Record the cause of a VM's coming end; only the first one counts."""
        with self._changed:
            entry = self._entries.get(name)
            if entry is not None and entry.cause is None:
                entry.cause = cause

    def ended(self, name: str, otherwise: ShutdownCause) -> None:
        """Record that a VM has ended. otherwise: its cause, if none is recorded yet."""
        self.record_cause(name, otherwise)
        with self._changed:
            if entry := self._entries.get(name):
                entry.ended = True
                self._changed.notify_all()

    def has_ended(self, name: str) -> bool:
        """Whether the end of a VM is recorded; also of a VM that this process did not start."""
        with self._changed:
            entry = self._entries.get(name)
            return entry is None or entry.ended

    def of(self, name: str, timeout: float) -> ShutdownCause:
        """Return why a VM ended; wait ``timeout`` seconds for the end's record."""
        deadline = time.monotonic() + timeout
        with self._changed:
            entry = self._entries.get(name)
            if entry is None:
                return ShutdownCause.UNKNOWN
            self._changed.wait_for(lambda: entry.ended, deadline - time.monotonic())
            return entry.cause or ShutdownCause.UNKNOWN
