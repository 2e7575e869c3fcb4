"""Scratch directories of builds and imports, for their temporary files; removed also after a kill."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from images.store.files import LOCK_POLL_SECONDS, exclusive_lock, try_exclusive_lock
from vmjobs.errors import VMJobsError
from vmjobs.subprocess import run

log = logging.getLogger(__name__)

BUILDS_FOLDER: Final = "builds"
#: Locked as long as the build or the import runs.
_LOCK: Final = "lock"
#: Open in the build and in all programs that it starts, and locked as long as any of them runs.
_MARKER: Final = "mark"
_PREFIX: Final = "build-"
#: Time-out to remove a root directory of some hundred thousand files, in seconds.
_REMOVE_SECONDS: Final = 300.0
#: Time-out for killed programs to exit, in seconds.
_END_SECONDS: Final = 10.0

#: Called repeatedly during a build; if it raises an error, the build ends.
CancelCheck = Callable[[], object]


def never_cancelled() -> None:
    """The default check, which never cancels a build."""


@dataclass(frozen=True)
class ScratchDir:
    """A directory for one build, removed afterwards, and the build's cancellation check.

    marker: open file that its programs inherit; it identifies them after the build was killed.
    """

    folder: Path
    marker: int
    check_cancelled: CancelCheck

    @property
    def environment(self) -> dict[str, str]:
        """Environment for programs: the directory as TMPDIR, if they can use it.

        In its user namespace mmdebstrap is another user. If that user cannot access the directory,
        mmdebstrap uses the system's temporary directory, where files stay if it is killed.
        """
        return {"TMPDIR": str(self.folder)} if _is_traversable(self.folder) else {}


@contextmanager
def scratch_dir(workdir: Path, check_cancelled: CancelCheck = never_cancelled) -> Iterator[ScratchDir]:
    """A new directory below ``workdir``, after removing directories of killed builds."""
    # An absolute path: programs get it as TMPDIR, and may change their directory.
    builds = (workdir / BUILDS_FOLDER).resolve()
    with locked_dir(builds, _PREFIX, _sweep_lock(workdir), check_cancelled) as folder:
        folder.chmod(0o711)
        with (folder / _MARKER).open("wb") as marker:
            fcntl.flock(marker, fcntl.LOCK_EX)
            yield ScratchDir(folder, marker.fileno(), check_cancelled)


@contextmanager
def locked_dir(
    parent: Path, prefix: str, sweep_lock: Path, check_cancelled: CancelCheck | None = None
) -> Iterator[Path]:
    """A new directory that no other user can read, after removing those of killed processes.

    Its process holds a lock in it as long as the context lasts.
    """
    with exclusive_lock(sweep_lock, check_cancelled):
        _sweep(parent, prefix)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        lock = (folder / _LOCK).open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
    with lock:
        try:
            yield folder
        finally:
            _remove(folder)


def remove_leftovers(workdir: Path) -> None:
    """End programs and remove directories of killed builds; those of running builds stay."""
    with exclusive_lock(_sweep_lock(workdir)):
        _sweep((workdir / BUILDS_FOLDER).resolve(), _PREFIX)


def _sweep_lock(workdir: Path) -> Path:
    return workdir / BUILDS_FOLDER / "sweep"


def _sweep(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        try:
            with (folder / _LOCK).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (folder / _MARKER).exists():  # an import has none
                    _end_programs(folder / _MARKER)
                _remove(folder)
        except OSError:
            continue  # in use, another user's, or removed meanwhile


def _end_programs(marker: Path) -> None:
    """Kill the programs of a killed build. Raises TimeoutError: they do not end."""
    deadline = time.monotonic() + _END_SECONDS
    while True:
        with try_exclusive_lock(marker) as ended:
            if ended:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"a program still has {marker} open")
        for group in _groups_with(marker):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        time.sleep(LOCK_POLL_SECONDS)  # there is no event for a released lock


def _groups_with(file: Path) -> set[int]:
    """Process groups, except our own, with a process that has a file open, if /proc shows it."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or another user's
            if any(open_one.readlink() == file for open_one in (process / "fd").iterdir()):
                found.add(os.getpgid(int(process.name)))
    return found - {os.getpgrp()}


def _remove(folder: Path) -> None:
    """Remove a directory, including files that mmdebstrap made as root of its user namespace.

    Unmount first, so that no mounted files are removed: a killed build by root leaves the node's
    /dev/shm mounted.
    """
    if not _unmount(folder):
        log.error("cannot remove a build's directory, something is mounted there: %s", folder)
        return
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists() and (left := [path for path in folder.iterdir() if path.is_dir()]):
        command: list[str | Path] = ["mmdebstrap", "--unshare-helper", "rm", "-rf", "--", *left]
        with suppress(VMJobsError):  # it fails to remove the directories themselves
            run(command, timeout=_REMOVE_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        log.error("cannot remove a build's directory: %s", folder)


def _unmount(folder: Path) -> bool:
    """Unmount everything below a directory; return whether that succeeded."""
    for place in reversed(_mount_points(folder)):  # the innermost first
        with suppress(VMJobsError):
            run(["umount", "--lazy", place], timeout=_REMOVE_SECONDS)
    return not _mount_points(folder)


def _mount_points(folder: Path) -> list[Path]:
    """Mount points below a directory, in the order of mounting (proc_pid_mountinfo(5))."""
    found, top = [], folder.resolve()
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        written = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), line.split()[4])
        place = Path(os.fsdecode(written))
        if place.is_relative_to(top):
            found.append(place)
    return found


def _is_traversable(folder: Path) -> bool:
    """Whether all users may traverse it and its parents."""
    return all(path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents))
