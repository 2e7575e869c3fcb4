"""Limits the space of an image cache, and evicts images to free space."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from images.content import CONTENT_PREFIX
from images.manifest import ImageManifest
from images.store.files import shared_lock, try_exclusive_lock
from images.store.image_store import ImageStore
from vmjobs.errors import DISK_FULL_ERRNOS, StorageFull
from vmjobs.model import MIB

log = logging.getLogger(__name__)


class CacheEviction:
    """The space that images may take below a store's root.

    Leased images stay. Eviction removes abandoned partial files first, then the image whose last
    lease is the oldest. All state is in the file system, under locks that end with their processes,
    so that several processes can share the space.

    limit: most bytes of images; 0: no limit. keep_free: bytes of the disk that images never take.
    """

    def __init__(self, store: ImageStore, limit: int = 0, keep_free: int = 0) -> None:
        self._store = store
        self._limit, self._keep_free = limit, keep_free

    @contextmanager
    def hold_lease(self, digest: str) -> Iterator[int]:
        """Prevent eviction of the image; yields a descriptor for :meth:`touch`.

        Raises:
            StorageFull: there is no space even for the lease's file.
        """
        try:
            with ExitStack() as held:
                yield self._acquire_lease(digest, held)
        finally:
            if not self._store.has_manifest(digest):
                self._remove_lease(digest)

    def _acquire_lease(self, digest: str, held: ExitStack) -> int:
        while True:
            try:
                with raise_storage_full():
                    return held.enter_context(shared_lock(self._lease_path(digest)))
            except StorageFull:
                if not self.evict_one():
                    raise

    @staticmethod
    def touch(lease: int) -> None:
        """Record that the image is in use now."""
        with suppress(OSError):
            now = time.time_ns()  # the file system's clock has steps of milliseconds
            os.utime(lease, ns=(now, now))

    def add_manifest(self, manifest: ImageManifest) -> None:
        """Store the manifest, so that eviction keeps the contents that it names."""
        with self._store.hold_lock():
            self._store.write_manifest(manifest)

    def ensure_free(self, size: int) -> None:
        """Evict images until ``size`` more bytes fit. The caller holds a lease.

        Raises:
            StorageFull: they do not fit, and there is nothing to evict.
        """
        while why := self._space_problem(size):
            if not self.evict_one():
                raise StorageFull(f"the image does not fit onto this node: {why}")

    def evict_one(self) -> bool:
        """Remove one unused partial file, content or image; whether there was one."""
        with self._store.hold_lock():
            return self._remove_partial() or self._remove_orphan() or self._evict_oldest()

    def remove_incomplete(self, digest: str) -> None:
        """Remove an incomplete image that does not fit, unless it is leased."""
        with (
            suppress(OSError),
            self._store.hold_lock(),
            try_exclusive_lock(self._lease_path(digest)) as locked,
        ):
            if locked and not self._store.complete(digest):
                self._remove_image(digest)
                self._remove_partial()

    def signature_path(self, digest: str) -> Path:
        """Path of an image's signatures, which are removed with the image."""
        return self._store.root / "signatures" / digest.removeprefix("sha256:")

    def used(self) -> int:
        """Bytes of disk that images take."""
        found = [*self._store.root.glob("contents/*/*"), *self._store.root.glob("partial/*")]
        return sum(_disk_bytes(path) for path in found)

    def _space_problem(self, size: int) -> str:
        """The reason why ``size`` more bytes do not fit; empty if they fit."""
        if self._limit and self.used() + size > self._limit:
            return f"images may take {self._limit // MIB} MiB here, and all other images are in use"
        free = shutil.disk_usage(self._store.root).free
        if free < self._keep_free + size:
            return f"the disk has {free // MIB} MiB left, and {self._keep_free // MIB} MiB are for jobs"
        return ""

    def _remove_partial(self) -> bool:
        """Remove a partial file that no fetch uses."""
        folder = self._store.folder
        paths = {path.with_suffix("") for path in self._store.root.glob("partial/*")}
        for path in sorted(paths, key=_modified_ns):
            digest = f"{CONTENT_PREFIX}{path.name}"
            with try_exclusive_lock(folder.lock_path(digest)) as locked:
                if locked:
                    log.info("removing the unfinished fetch of %s", digest)
                    folder.drop_partial(digest)
                    folder.lock_path(digest).unlink(missing_ok=True)
                    return True
        return False

    def _remove_orphan(self) -> bool:
        """Remove a content of no image: a process died during an eviction.

        The contents of an image with a damaged manifest go, too; they are fetched again if needed.
        """
        needed = self._store.contents_of(self._store.digests())
        for content in self._store.folder.list():
            if content not in needed:
                self._store.folder.remove(content)
                return True
        return False

    def _evict_oldest(self) -> bool:
        for digest in sorted(self._store.digests(), key=lambda d: _modified_ns(self._lease_path(d))):
            with try_exclusive_lock(self._lease_path(digest)) as locked:
                if locked:
                    log.info("evicting the image %s", digest)
                    self._remove_image(digest)
                    return True
        return False

    def _remove_image(self, digest: str) -> None:
        contents = self._store.contents_of([digest])
        self._store.remove_manifest(digest)
        self.signature_path(digest).unlink(missing_ok=True)
        for content in contents - self._store.contents_of(self._store.digests()):
            self._store.folder.remove(content)
        self._lease_path(digest).unlink(missing_ok=True)

    def _remove_lease(self, digest: str) -> None:
        """Remove the lease and the signatures of an image that is not here."""
        # Errors do not matter; on a full disk, even the lock can fail.
        with suppress(OSError), try_exclusive_lock(self._lease_path(digest)) as locked:
            if locked:
                self.signature_path(digest).unlink(missing_ok=True)
                self._lease_path(digest).unlink(missing_ok=True)

    def _lease_path(self, digest: str) -> Path:
        return self._store.root / "leases" / digest.removeprefix("sha256:")


@contextmanager
def raise_storage_full() -> Iterator[None]:
    """Raise StorageFull in place of each OSError that means a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise StorageFull(f"the image does not fit onto this node: {error.strerror}") from error


def _disk_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
