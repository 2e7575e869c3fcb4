"""Garbage in a store of one's own: images without a name, and contents of no image."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from images.files import exclusive, free
from images.store import ImageStore
from vmjobs.errors import DigestMismatch, NotFound
from vmjobs.wire import GcReport

#: A build stores its contents first, and then the image that has them.
NEW_SECONDS: Final = 3600


def collect_local(store: ImageStore, *, dry_run: bool = False) -> GcReport:
    """Remove images that have no name, then contents that no image has. Damaged manifests go, too.

    What is being fetched is left alone, and what is so new that its image or name may be still to
    come.
    """
    with exclusive(store.root / "locks" / "room"):
        named = {entry.digest for entry in store.list()}
        present = {f"sha256:{path.stem}": path for path in store.root.glob("manifests/*.json")}
        nameless = {d for d, path in present.items() if d not in named and _is_old(_status(path))}
        needed: set[str] = set()
        for digest in present.keys() - nameless:
            with suppress(NotFound, DigestMismatch):
                needed.update(part.digest for part in store.manifest(digest).parts())
        contents = size = 0
        for content in [c for c in store.folder.list() if c not in needed]:
            with free(store.folder.lock(content)) as alone:
                status = _status(store.folder.path(content))
                if not alone or status is None or not _is_old(status):
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
    return status is not None and status.st_mtime <= time.time() - NEW_SECONDS


def _status(path: Path) -> os.stat_result | None:
    with suppress(FileNotFoundError):
        return path.stat()
    return None
