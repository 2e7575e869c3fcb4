"""Control groups (v2) for machines, beside this process's own, below one that was delegated.

Delegated is a group that is marked so: systemd puts ``user.delegate`` on the groups of units with
``Delegate=`` (its version 251 and later). Nothing is done in any other, whoever may write there.

A group has either processes or groups with controllers below it, so this process must be in a group
below the delegated one already (``DelegateSubgroup=``, systemd 254 and later). It does not move there
by itself: whoever starts its successor would find the group closed while machines run.
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

MARK = "user.delegate"
#: What machines are held by; memory also so that written pages count for their writer (io.max).
CONTROLLERS = ("cpu", "io", "memory", "pids")
#: Seconds until all processes of a machine are in its group, and until a group can be removed.
PATIENCE = 5.0


@dataclass(frozen=True)
class Delegation:
    """A delegated group, and the controllers that it may hand on."""

    root: Path
    controllers: frozenset[str]

    def hold(
        self, name: str, settings: Iterable[tuple[str, str]], find: Callable[[], list[int]]
    ) -> None:
        """Make a machine's group and move the machine's processes there, and what they start meanwhile.

        Args:
            settings: files of the group, and what is written there.
            find: the machine's processes.

        Raises:
            HypervisorError: it cannot be done.
        """
        group = self.root / name
        try:
            for controller in self.controllers:
                (self.root / "cgroup.subtree_control").write_text(f"+{controller}")
            group.mkdir(exist_ok=True)
            for file, content in settings:
                (group / file).write_text(content)
            _move_all(lambda: set(find()) - _members(group), group)
        except OSError as error:
            raise HypervisorError(
                f"{name} cannot be put into the cgroup {group}: {reason_of(error)}"
            ) from error

    def release(self, name: str) -> None:
        """Remove a machine's group, once its processes are gone. Repeating it is no error."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                (self.root / name).rmdir()
            except FileNotFoundError:
                return
            except OSError as error:
                # A process that has ended stays in its group until somebody has asked how it ended.
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise HypervisorError(
                        f"the cgroup of {name} cannot be removed: {reason_of(error)}"
                    ) from error
                os.sched_yield()
            else:
                return


def delegated(proc: Path = Path("/proc/self")) -> Delegation | None:
    """The delegated group that this process's own is in; None: none was delegated."""
    own = _own_group(proc)
    if own is None:
        return None
    with suppress(OSError):
        if os.getxattr(own.parent, MARK) == b"1" and os.access(own.parent, os.W_OK):
            there = (own.parent / "cgroup.controllers").read_text().split()
            return Delegation(own.parent, frozenset(there) & set(CONTROLLERS))
    return None


def block_device(path: Path) -> str:
    """The disk that a file lies on, as io.max names it; empty: none that can be named."""
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    with suppress(OSError):
        device = device.resolve(strict=True)
        whole = device.parent if (device / "partition").exists() else device
        return (whole / "dev").read_text().strip()
    return ""


def _own_group(proc: Path) -> Path | None:
    """Where this process's own group shows; None: cgroup v2 is not mounted here."""
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


def _members(group: Path) -> set[int]:
    return {int(pid) for pid in (group / "cgroup.procs").read_text().split()}


def _move_all(find: Callable[[], set[int]], group: Path) -> None:
    """Move processes until none is found any more: they may start others meanwhile."""
    deadline = time.monotonic() + PATIENCE
    while pids := find():
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, "processes are started faster than moved", str(group))
        for pid in pids:
            with suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))
