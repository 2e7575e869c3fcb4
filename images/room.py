"""How much an image cache may hold, and what goes first."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from images.content import PREFIX
from images.files import exclusive, free, shared
from images.manifest import ImageManifest
from images.store import ImageStore
from vmjobs.errors import DigestMismatch, NotFound, StorageFull
from vmjobs.model import MIB

log = logging.getLogger(__name__)

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Room:
    """The room that images may take below a store's root.

    An image that is leased stays. Of the others the one that was leased longest ago goes first,
    after what was left of fetches that were given up. Everything is kept in the file system, under
    locks that end with their processes, so that several of them may share the room.

    limit: bytes of images at most; 0: no limit. keep_free: bytes of the disk to be left alone.
    """

    def __init__(self, store: ImageStore, limit: int, keep_free: int) -> None:
        self._store = store
        self._limit, self._keep_free = limit, keep_free

    @contextmanager
    def leased(self, digest: str) -> Iterator[int]:
        """The image is not evicted while the context lasts; yields a descriptor for :meth:`touch`.

        Raises:
            StorageFull: not even that can be written down.
        """
        try:
            with ExitStack() as held:
                yield self._take(digest, held)
        finally:
            if not self._store.has_manifest(digest):
                self._forget(digest)

    def _take(self, digest: str, held: ExitStack) -> int:
        while True:
            try:
                return held.enter_context(shared(self._lease(digest)))
            except OSError as error:
                if not is_full(error):
                    raise
                if not self.make():
                    raise full(error) from error

    @staticmethod
    def touch(lease: int) -> None:
        """Note that the image is used now."""
        with suppress(OSError):
            now = time.time_ns()  # the file system's own clock goes in steps of milliseconds
            os.utime(lease, ns=(now, now))

    def expect(self, manifest: ImageManifest) -> None:
        """Have the image's contents counted as needed, those that are here and those to come."""
        with self._settled():
            self._store.write_manifest(manifest)

    def claim(self, size: int) -> None:
        """Have room for ``size`` more bytes. The caller holds a lease.

        Raises:
            StorageFull: there is none, and nothing that may go.
        """
        while why := self._lacking(size):
            if not self.make():
                raise StorageFull(f"the image does not fit onto this node: {why}")

    def make(self) -> bool:
        """Remove one thing that nobody uses; whether there was one."""
        with self._settled():
            return self._drop_partial() or self._drop_orphan() or self._drop_oldest()

    def drop_incomplete(self, digest: str) -> None:
        """Remove what is here of an image that does not fit, unless somebody else is at work on it."""
        with suppress(OSError), self._settled(), free(self._lease(digest)) as alone:
            if alone and not self._store.complete(digest):
                self._remove(digest)
                self._lease(digest).unlink(missing_ok=True)
                self._drop_partial()

    def signature_path(self, digest: str) -> Path:
        """Where an image's signatures are; they go with it."""
        return self._store.root / "signatures" / digest.removeprefix("sha256:")

    def used(self) -> int:
        """Bytes of disk that images take."""
        found = [*self._store.root.glob("contents/*/*"), *self._store.root.glob("partial/*")]
        return sum(_blocks(path) for path in found)

    def _lacking(self, size: int) -> str:
        """Why there is no room for ``size`` more bytes; empty if there is."""
        if self._limit and self.used() + size > self._limit:
            return f"images may take {self._limit // MIB} MiB here, and all others are in use"
        disk = os.statvfs(self._store.root)
        if disk.f_bavail * disk.f_frsize < self._keep_free + size:
            left = disk.f_bavail * disk.f_frsize // MIB
            return f"the disk has {left} MiB left, of which {self._keep_free // MIB} MiB are for jobs"
        return ""

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Nobody else adds a manifest or removes anything."""
        with exclusive(self._store.root / "locks" / "room"):
            yield

    def _drop_partial(self) -> bool:
        """Remove an unfinished content that nobody is at work on."""
        folder = self._store.folder
        paths = {path.with_suffix("") for path in self._store.root.glob("partial/*")}
        for path in sorted(paths, key=_modified):
            digest = f"{PREFIX}{path.name}"
            with free(folder.lock(digest)) as alone:
                if alone:
                    log.info("giving up the unfinished fetch of %s", digest)
                    folder.drop_partial(digest)
                    folder.lock(digest).unlink(missing_ok=True)
                    return True
        return False

    def _drop_orphan(self) -> bool:
        """Remove a content of no image: somebody was killed while evicting one."""
        needed = self._needed(self._digests())
        for content in self._store.folder.list():
            if content not in needed:
                self._store.folder.remove(content)
                return True
        return False

    def _drop_oldest(self) -> bool:
        for digest in sorted(self._digests(), key=self._last_use):
            with free(self._lease(digest)) as alone:
                if alone:
                    log.info("evicting the image %s", digest)
                    self._remove(digest)
                    self._lease(digest).unlink(missing_ok=True)
                    return True
        return False

    def _remove(self, digest: str) -> None:
        contents = self._needed([digest])
        self._store.remove_manifest(digest)
        self.signature_path(digest).unlink(missing_ok=True)
        for content in contents - self._needed(self._digests()):
            self._store.folder.remove(content)

    def _digests(self) -> list[str]:
        return [f"sha256:{path.stem}" for path in self._store.root.glob("manifests/*.json")]

    def _needed(self, digests: list[str]) -> set[str]:
        found: set[str] = set()
        for digest in digests:
            with suppress(NotFound, DigestMismatch):  # a damaged one is fetched again if needed
                found.update(part.digest for part in self._store.manifest(digest).parts())
        return found

    def _last_use(self, digest: str) -> int:
        return _modified(self._lease(digest))

    def _forget(self, digest: str) -> None:
        """Remove what there is beside an image that is not here."""
        # It is a trifle, and on a full disk even taking a lock can fail.
        with suppress(OSError), free(self._lease(digest)) as alone:
            if alone:
                self.signature_path(digest).unlink(missing_ok=True)
                self._lease(digest).unlink(missing_ok=True)

    def _lease(self, digest: str) -> Path:
        return self._store.root / "leases" / digest.removeprefix("sha256:")


def is_full(error: OSError) -> bool:
    """Whether an error means that no room is left on the disk."""
    return error.errno in _FULL


def full(error: OSError) -> StorageFull:
    """An error that means that no room is left, as ours."""
    return StorageFull(f"the image does not fit onto this node: {error.strerror}")


def _blocks(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
