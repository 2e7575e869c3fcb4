"""Private directories for imports, removed afterwards, also those of killed imports."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from images.store.files import exclusive_lock

_PREFIX: Final = "container-"
_LOCK: Final = "lock"


@contextmanager
def private_folder(workdir: Path) -> Iterator[Path]:
    """A directory in ``workdir`` that no other user can read; removes those of killed imports.

    An import holds a lock in its own directory as long as it runs.
    """
    with exclusive_lock(workdir / "containers" / "sweep"):
        _sweep(workdir)
        folder = Path(tempfile.mkdtemp(dir=workdir, prefix=_PREFIX))
        lock = (folder / _LOCK).open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(workdir: Path) -> None:
    for folder in workdir.glob(f"{_PREFIX}*"):
        try:
            with (folder / _LOCK).open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use, another user's, or removed meanwhile
