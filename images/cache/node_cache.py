"""A node's image cache: fetches images once, verifies them, and stores sparse files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from images.cache.eviction import CacheEviction, raise_storage_full
from images.cache.fetch import ContentFetch
from images.manifest import ImageManifest, Part
from images.store.files import exclusive_lock, write_atomically
from images.store.image_store import ImageStore, check_digest, part_progress
from images.transfer.remote import CountingFetcher, ImageFetcher
from vmjobs.errors import DigestMismatch, ImageRejected, NotFound, StorageFull
from vmjobs.file_transfer import ProgressCallback
from vmjobs.hypervisor.base import BootImage
from vmjobs.model import MIB

#: Checks an image's digest and signatures; raises :class:`vmjobs.errors.ImageRejected`.
SignatureCheck = Callable[[str, str], object]

#: Attempts to fetch an image: other processes may evict or damage it meanwhile.
_MAX_ATTEMPTS: Final = 3


class ImageCache:
    """An :class:`vmjobs.agent.image_source.ImageSource` that fetches missing images.

    Several threads and processes may share ``root``: one of them fetches a content, and the others
    wait for it. Damaged contents are repaired, and an interrupted fetch continues where it stopped.

    limit: most bytes of images; 0: no limit. keep_free: bytes of the disk that images never take.
    trust: checks an image's signatures at each use; None: every image is accepted.
    hits, misses: number of leases of images that were complete in the cache, and that were not.
    """

    def __init__(
        self,
        root: Path,
        fetch: ImageFetcher,
        *,
        limit: int = 0,
        keep_free: int = 0,
        trust: SignatureCheck | None = None,
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)  # not every user may read every image
        self._store = ImageStore(root)
        self._fetcher = CountingFetcher(fetch)
        self._eviction = CacheEviction(self._store, limit, keep_free)
        self._trust = trust
        self.hits = self.misses = 0
        self._counter_lock = threading.Lock()

    def prepare(self, digest: str, progress: ProgressCallback | None = None) -> BootImage:
        """Fetch the image if it is not here, verify it, and return its files.

        Raises:
            NotFound: there is no such image. DigestMismatch: fetched bytes have a wrong digest.
            Unavailable: the image is not here, and its repository is unreachable.
            StorageFull: it does not fit, even after the eviction of all unused images.
            ImageRejected: no trusted key signed it.
        """
        with self._hold_lease(digest):
            return self._prepare(digest, progress)

    @contextmanager
    def lease(self, digest: str, progress: ProgressCallback | None = None) -> Iterator[BootImage]:
        """As :meth:`prepare`; the image is not evicted while the context lasts."""
        with self._hold_lease(digest) as lease:
            self._count_lease(digest)
            image = self._prepare(digest, progress)
            self._eviction.touch(lease)
            try:
                yield image
            finally:
                self._eviction.touch(lease)

    def cached(self) -> list[str]:
        """Digests of the images that are complete in the cache."""
        return self._store.cached()

    def fetched(self, digest: str) -> int:
        """Bytes of an image's contents that this process has fetched so far."""
        return self._fetcher.fetched(digest)

    def used(self) -> int:
        """Bytes of disk that images take."""
        return self._eviction.used()

    def _count_lease(self, digest: str) -> None:
        here = self._store.complete(digest)
        with self._counter_lock:
            self.hits += here
            self.misses += not here

    @contextmanager
    def _hold_lease(self, digest: str) -> Iterator[int]:
        check_digest(digest)
        try:
            with self._eviction.hold_lease(digest) as lease:
                yield lease
        except StorageFull:
            self._eviction.remove_incomplete(digest)
            raise

    def _prepare(self, digest: str, progress: ProgressCallback | None) -> BootImage:
        with raise_storage_full():
            return self._prepare_with_retries(digest, progress)

    def _prepare_with_retries(self, digest: str, progress: ProgressCallback | None) -> BootImage:
        if self._trust is not None:
            self._require_trust(digest, self._trust)
        with suppress(NotFound, DigestMismatch):  # missing or damaged: a fetch repairs both
            return self._store.prepare(digest, progress)
        for _ in range(_MAX_ATTEMPTS - 1):
            self._fetch_image(digest, progress)
            with suppress(NotFound, DigestMismatch):
                return self._store.prepare(digest)
        self._fetch_image(digest, progress)
        return self._store.prepare(digest)

    def _require_trust(self, digest: str, trust: SignatureCheck) -> None:
        """Refuse an image without a trusted key's signature; cache its signatures."""
        path = self._eviction.signature_path(digest)
        try:
            trust(digest, path.read_text("ascii"))
        except (FileNotFoundError, UnicodeDecodeError, ImageRejected):
            # The image is new here, it has another signature now, or the trusted keys changed.
            signature = self._fetcher.signature(digest)
            trust(digest, signature)
            write_atomically(path, signature.encode("ascii"), self._store.folder.temporary)

    def _fetch_image(self, digest: str, progress: ProgressCallback | None) -> None:
        manifest = self._get_manifest(digest)
        self._eviction.ensure_free(MIB)
        self._eviction.add_manifest(manifest)
        done = 0
        for part in manifest.parts():
            on_progress = part_progress(progress, done, manifest.size)
            lock_path = self._store.folder.lock_path(part.digest)
            with exclusive_lock(lock_path, waiting=partial(on_progress, 0)):
                self._ensure_content(digest, part, on_progress)
            done += part.size
            on_progress(part.size)

    def _ensure_content(self, image: str, part: Part, on_progress: Callable[[int], None]) -> None:
        folder = self._store.folder
        try:
            folder.verify(part.digest, part.size, on_progress)
        except (NotFound, DigestMismatch):
            ContentFetch(folder, self._eviction, self._fetcher, image, part, on_progress).run()

    def _get_manifest(self, digest: str) -> ImageManifest:
        try:
            return self._store.manifest(digest)
        except (NotFound, DigestMismatch):
            return ImageManifest.parse(self._fetcher.manifest(digest), digest)
