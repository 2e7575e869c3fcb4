"""Where a build makes what nobody is to find afterwards: its files, and its programs'."""

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

from images.files import WAIT_SECONDS, exclusive, free
from vmjobs.errors import VMJobsError
from vmjobs.subprocess import run

log = logging.getLogger(__name__)

FOLDER: Final = "builds"
#: Locked by the build for as long as it lives.
_LOCK: Final = "lock"
#: Open in the build and in all programs that it starts, and locked for as long as any of them lives.
_MARK: Final = "mark"
_PREFIX: Final = "build-"
#: Removing a root directory of some hundred thousand files, in seconds.
_REMOVE_SECONDS: Final = 300.0
#: For programs that were killed to be gone, in seconds.
_END_SECONDS: Final = 10.0

#: Called every now and then while a build goes on; what it raises ends the build.
Check = Callable[[], object]


def go_on() -> None:
    """Nobody can stop this build but by stopping its process."""


@dataclass(frozen=True)
class Workplace:
    """A directory for one build, gone afterwards, and its orders to stop.

    mark: open file that its programs inherit; by it they are known when the build is no more.
    """

    folder: Path
    mark: int
    check: Check

    @property
    def environment(self) -> dict[str, str]:
        """What programs are told of it.

        In a user namespace of its own mmdebstrap is another user. Where that one cannot pass, it
        works in the system's temporary directory, and what is killed there stays.
        """
        return {"TMPDIR": str(self.folder)} if _passable(self.folder) else {}


@contextmanager
def workplace(workdir: Path, check: Check = go_on) -> Iterator[Workplace]:
    """A fresh directory below ``workdir``; what killed builds left there goes first."""
    with exclusive(_sweeping(workdir), check):
        _sweep(workdir)
        # Of an absolute path: programs have it in TMPDIR, wherever they go.
        folder = Path(tempfile.mkdtemp(dir=(workdir / FOLDER).resolve(), prefix=_PREFIX))
        folder.chmod(0o711)
        lock, mark = (folder / _LOCK).open("wb"), (folder / _MARK).open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(mark, fcntl.LOCK_EX)
    with lock, mark:
        try:
            yield Workplace(folder, mark.fileno(), check)
        finally:
            _remove(folder)


def remove_leftovers(workdir: Path) -> None:
    """End and remove what builds left that were killed. What those have that live stays."""
    with exclusive(_sweeping(workdir)):
        _sweep(workdir)


def _sweeping(workdir: Path) -> Path:
    return workdir / FOLDER / "sweep"


def _sweep(workdir: Path) -> None:
    for folder in (workdir / FOLDER).resolve().glob(f"{_PREFIX}*"):
        try:
            with (folder / _LOCK).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end_programs(folder / _MARK)
                _remove(folder)
        except OSError:
            continue  # at work, another user's, or gone by now


def _end_programs(mark: Path) -> None:
    """Kill what a build that is no more has started.  Raises TimeoutError: it does not end."""
    deadline = time.monotonic() + _END_SECONDS
    while True:
        with free(mark) as ended:
            if ended:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"somebody has {mark} still open")
        for group in _groups_with(mark):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        time.sleep(WAIT_SECONDS)  # whoever lets go of a file's lock calls nobody


def _groups_with(file: Path) -> set[int]:
    """Process groups, but our own, of which a process has a file open; those that we may look at."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone by now, or somebody else's
            if any(open_one.readlink() == file for open_one in (process / "fd").iterdir()):
                found.add(os.getpgid(int(process.name)))
    return found - {os.getpgrp()}


def _remove(folder: Path) -> None:
    """Remove all of it, also what mmdebstrap made as the root of its user namespace.

    Nothing that is mounted there goes with it: of a killed build by root the node's /dev/shm is.
    """
    if not _unmount(folder):
        log.error("what a build left is not removed, as something is mounted there: %s", folder)
        return
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists() and (left := [path for path in folder.iterdir() if path.is_dir()]):
        command: list[str | Path] = ["mmdebstrap", "--unshare-helper", "rm", "-rf", "--", *left]
        with suppress(VMJobsError):  # it cannot remove the directories themselves, and says so
            run(command, timeout=_REMOVE_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        log.error("what a build left cannot be removed: %s", folder)


def _unmount(folder: Path) -> bool:
    """Unmount all that is mounted below; whether nothing is now."""
    for place in reversed(_mounted(folder)):  # the innermost first
        with suppress(VMJobsError):
            run(["umount", "--lazy", place], timeout=_REMOVE_SECONDS)
    return not _mounted(folder)


def _mounted(folder: Path) -> list[Path]:
    """What is mounted below, in the order of mounting (proc_pid_mountinfo(5))."""
    found, top = [], folder.resolve()
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        written = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), line.split()[4])
        place = Path(os.fsdecode(written))
        if place.is_relative_to(top):
            found.append(place)
    return found


def _passable(folder: Path) -> bool:
    """Whether everybody may go through it to what he may use there."""
    return all(path.stat().st_mode & stat.S_IXOTH for path in (folder, *folder.parents))
