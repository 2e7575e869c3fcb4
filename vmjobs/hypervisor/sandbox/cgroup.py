"""Control groups (v2) for VMs, siblings of this process's own group in a delegated one.

A delegated group is marked: systemd sets the attribute ``user.delegate`` on the groups of units with
``Delegate=`` (version 251 and later). No other group is touched, even if it is writable.

A group has either processes, or child groups with controllers, so this process must already run in a
child of the delegated group (``DelegateSubgroup=``, systemd 254 and later). It does not move itself
there: the supervisor could not start its successor in the delegated group while VMs run.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vmjobs.errors import HypervisorError, reason_of

DELEGATE_ATTRIBUTE = "user.delegate"
#: Controllers used for VMs; memory also because io.max then charges writeback to the writer.
CONTROLLERS = ("cpu", "io", "memory", "pids")
#: Seconds until all processes of a VM are in its group, and until a group can be removed.
TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class Delegation:
    """A delegated group, and the controllers that it can pass on."""

    root: Path
    controllers: frozenset[str]

    def enforce(
        self, name: str, settings: Iterable[tuple[str, str]], find: Callable[[], list[int]]
    ) -> None:
        """Create a VM's group and move its processes there, including new ones.

        Args:
            settings: files of the group, and their contents to write.
            find: returns the VM's processes.

        Raises:
            HypervisorError: the group cannot be made or filled.
        """
        group = self.root / name
        try:
            for controller in self.controllers:
                (self.root / "cgroup.subtree_control").write_text(f"+{controller}")
            group.mkdir(exist_ok=True)
            for file, content in settings:
                (group / file).write_text(content)
            _move_all(lambda: set(find()) - _pids_in(group), group)
        except OSError as error:
            raise HypervisorError(
                f"{name} cannot be put into the cgroup {group}: {reason_of(error)}"
            ) from error

    def remove(self, name: str) -> None:
        """Remove a VM's group after its processes ended. Repeating it is no error."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            try:
                (self.root / name).rmdir()
            except FileNotFoundError:
                return
            except OSError as error:
                # A process that has ended stays in its group until its parent reaps it.
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise HypervisorError(
                        f"the cgroup of {name} cannot be removed: {reason_of(error)}"
                    ) from error
                os.sched_yield()
            else:
                return


def find_delegation(proc: Path = Path("/proc/self")) -> Delegation | None:
    """Return the delegated group above this process's own; None: none was delegated."""
    own = _own_group(proc)
    if own is None:
        return None
    with suppress(OSError):
        if os.getxattr(own.parent, DELEGATE_ATTRIBUTE) == b"1" and os.access(own.parent, os.W_OK):
            there = (own.parent / "cgroup.controllers").read_text().split()
            return Delegation(own.parent, frozenset(there) & set(CONTROLLERS))
    return None


def block_device(path: Path) -> str:
    """The disk that holds a file, as io.max names it; empty: no block device."""
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    with suppress(OSError):
        device = device.resolve(strict=True)
        whole = device.parent if (device / "partition").exists() else device
        return (whole / "dev").read_text().strip()
    return ""


def _own_group(proc: Path) -> Path | None:
    """Return the directory of this process's group; None: cgroup v2 is not mounted."""
    with suppress(OSError, StopIteration):
        lines = (proc / "cgroup").read_text().splitlines()
        group = Path(next(line for line in lines if line.startswith("0::")).removeprefix("0::"))
        for line in (proc / "mountinfo").read_text().splitlines():
            mount, _, source = line.partition(" - ")
            if source.startswith("cgroup2 "):
                top, at = mount.split()[3:5]
                if group.is_relative_to(top):
                    return Path(at) / group.relative_to(top)
    return None


def _pids_in(group: Path) -> set[int]:
    return {int(pid) for pid in (group / "cgroup.procs").read_text().split()}


def _move_all(find: Callable[[], set[int]], group: Path) -> None:
    """Move processes until ``find`` finds none: they may start others meanwhile."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while pids := find():
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, "processes are started faster than moved", str(group))
        for pid in pids:
            with suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))
