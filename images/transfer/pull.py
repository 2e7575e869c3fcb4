"""Fetches images from a repository into a local store, or their disks into files.

The fetch works as on a node: several segments at once, verified, sparse, and continued after an
interruption. It evicts nothing from the store.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from images.cache.eviction import CacheEviction
from images.cache.fetch import ContentFetch
from images.content import ProgressCallback
from images.manifest import ImageManifest, Part
from images.store.image_store import ImageStore, track_parts
from images.transfer.remote import ImageFetcher
from vmjobs.errors import DISK_FULL_ERRNOS, InvalidRequest, StorageFull
from vmjobs.fsync import sync_directory


class _NoEviction(CacheEviction):
    """The space of a store whose images are there on purpose: evicts none of them."""

    def evict_one(self) -> bool:
        return False


def pull_image(
    store: ImageStore, fetch: ImageFetcher, digest: str, on_progress: ProgressCallback
) -> ImageManifest:
    """Fetch an image into the store, and verify every byte.

    Raises:
        NotFound, Unavailable: from the fetcher; the next attempt continues with the partial file.
        DigestMismatch: fetched bytes have a wrong digest.
        StorageFull: it does not fit.
    """
    manifest = ImageManifest.parse(fetch.manifest(digest), digest)
    for part, report in track_parts(manifest, lambda done, _size: on_progress(done)):
        ContentFetch(store.folder, _NoEviction(store), fetch, digest, part, report).run()
    store.put_manifest(manifest)
    return manifest


def pull_file(
    target: Path,
    fetch: ImageFetcher,
    digest: str,
    content: str,
    size: int,
    on_progress: ProgressCallback,
) -> None:
    """Fetch one content of an image to a raw, sparse file, which appears when complete.

    The partial file is in a directory beside it. Raises as :func:`pull_image` does.
    """
    scratch = target.with_name(f".{target.name[:128]}.pull")
    try:
        store = ImageStore(scratch)
        part = Part(digest=content, size=size)
        ContentFetch(store.folder, _NoEviction(store), fetch, digest, part, on_progress).run()
        path = store.folder.verify(content)
        path.chmod(0o644)
        path.replace(target)
        sync_directory(target.absolute().parent)
        shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise StorageFull(f"no space for {target}: {error.strerror}") from error
        raise InvalidRequest(f"cannot write {target}: {error.strerror}") from error
