"""Garbage collection of a local store: images without a name, contents of no image."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from images.store.files import try_exclusive_lock
from images.store.image_store import ImageStore
from vmjobs.wire import GcReport

#: Minimum age: a build stores its contents before the image that has them.
MIN_AGE_SECONDS: Final = 3600


def collect_garbage(store: ImageStore, *, dry_run: bool = False) -> GcReport:
    """Remove images without a name (and damaged manifests), then contents of no image.

    Contents that are being fetched stay, and so does all that is so new that its image or name may
    be about to be stored.
    """
    with store.hold_lock():
        named = {entry.digest for entry in store.list()}
        present = {f"sha256:{path.stem}": path for path in store.root.glob("manifests/*.json")}
        nameless = {d for d, path in present.items() if d not in named and _is_old(_status(path))}
        needed = store.contents_of(present.keys() - nameless)
        contents = size = 0
        for content in [c for c in store.folder.list() if c not in needed]:
            with try_exclusive_lock(store.folder.lock_path(content)) as locked:
                status = _status(store.folder.path(content))
                if not locked or status is None or not _is_old(status):
                    continue
                contents += 1
                size += status.st_blocks * 512
                if not dry_run:
                    store.folder.remove(content)
        if not dry_run:
            for digest in nameless:
                store.remove_manifest(digest)
    return GcReport(images=len(nameless), contents=contents, bytes=size)


def _is_old(status: os.stat_result | None) -> bool:
    return status is not None and status.st_mtime <= time.time() - MIN_AGE_SECONDS


def _status(path: Path) -> os.stat_result | None:
    with suppress(FileNotFoundError):
        return path.stat()
    return None
