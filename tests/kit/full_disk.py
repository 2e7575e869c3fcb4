"""Small disks; a full disk, or a lack of file descriptors, for this process."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(place: Path, mib: float, inodes: int = 0) -> Iterator[Path]:
    """Mount an empty file system of this size on a directory. inodes: 0 for any number."""
    place.mkdir(exist_ok=True)
    options = f"size={int(mib * 1024)}k,nr_inodes={inodes}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@contextmanager
def nothing_fits() -> Iterator[None]:
    """Let this process write no byte to any file (setrlimit(2); Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """Let this process open only ``count`` more files."""
    gc.disable()  # otherwise files of earlier tests may be closed in between
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        gc.enable()
