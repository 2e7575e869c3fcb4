"""Directories of embedded libvirt drivers: one for each process that has one."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from vmjobs.errors import HypervisorError, reason_of

#: Embedded drivers that root may have on one node at a time, one per process.
MAX_EMBEDDED = 16

_CONF = """\
user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
security_driver = "none"
namespaces = [ ]
cgroup_controllers = [ ]
stdio_handler = "file"
"""


class EmbeddedRoot:
    """Directories below ``parent``; this process locks one for as long as it lives."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._taken: Path | None = None

    def uri(self) -> str:
        """Return the URI of a driver in this process's directory, the same every time.

        Raises:
            HypervisorError: all directories are in use, or it cannot be set up.
        """
        with self._lock:
            try:
                self._taken = self._taken or self._take()
            except OSError as error:
                raise HypervisorError(
                    f"cannot set up libvirt in {self._parent}: {reason_of(error)}"
                ) from error
        return f"qemu:///embed?root={self._taken}"

    def logs(self, name: str) -> list[Path]:
        """The log files of a VM, from the drivers of all processes."""
        return list(self._parent.glob(f"libvirt-*/log/qemu/{name}.log*"))

    def _take(self) -> Path:
        for number in range(MAX_EMBEDDED):
            root = self._parent / f"libvirt-{number}"
            (root / "etc").mkdir(parents=True, exist_ok=True, mode=0o700)
            if _lock_file(root / "lock") is not None:
                (root / "etc" / "qemu.conf").write_text(_CONF)
                return root
        raise HypervisorError(f"{MAX_EMBEDDED} processes use libvirt in {self._parent} already")


def _lock_file(path: Path) -> int | None:
    """Lock a file for as long as this process lives; None if another one holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
