"""A node's image cache: fetches images once, verifies them, and stores sparse files."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from images.cache.eviction import CacheEviction, raise_storage_full
from images.cache.fetch import ContentFetch
from images.cache.lazy_fetch import LazyFetch
from images.cache.lazy_service import serve_disk
from images.manifest import ImageManifest, Part
from images.store.files import write_atomically
from images.store.image_store import ImageStore, check_digest, make_boot_image, track_parts
from images.transfer.remote import CountingFetcher, ImageFetcher
from vmjobs.agent.image_source import LazyStart
from vmjobs.errors import (
    DigestMismatch,
    HypervisorError,
    ImageRejected,
    NotFound,
    StorageFull,
    Unavailable,
    VMJobsError,
)
from vmjobs.file_transfer import ProgressCallback
from vmjobs.hypervisor.base import BootImage, LazyDisk
from vmjobs.model import MIB

log = logging.getLogger(__name__)

#: Checks an image's digest and signatures; raises :class:`vmjobs.errors.ImageRejected`.
SignatureCheck = Callable[[str, str], object]

#: Attempts to fetch an image: other processes may evict or damage it meanwhile.
_MAX_ATTEMPTS: Final = 3
#: Interval of checks whether an image is still wanted, in seconds.
_CHECK_SECONDS: Final = 0.2


class ImageCache:
    """An :class:`vmjobs.agent.image_source.ImageSource` that fetches missing images.

    Several threads and processes may share ``root``: one of them fetches a content, and the others
    wait for it. Damaged contents are repaired, and an interrupted fetch continues where it stopped.

    limit: most bytes of images; 0: no limit. keep_free: bytes of the disk that images never take.
    trust: checks an image's signatures at each use; None: every image is accepted.
    lazy_start: whether VMs may start while the root disk is fetched. patience: seconds for which such
        a VM waits for an unreachable repository.
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
        lazy_start: bool = False,
        patience: float = 1800.0,
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)  # not every user may read every image
        self._store = ImageStore(root)
        self._fetcher = CountingFetcher(fetch)
        self._eviction = CacheEviction(self._store, limit, keep_free)
        self._trust = trust
        self._lazy_start, self._patience = lazy_start, patience
        self.hits = self.misses = 0
        self._lock = threading.Lock()
        #: Fetches of root disks from which VMs may start, by content.
        self._fetches: dict[str, LazyFetch] = {}
        self._closed = False

    def prepare(self, digest: str, progress: ProgressCallback | None = None) -> BootImage:
        """Fetch the image if it is not here, verify it, and return its files.

        Raises:
            NotFound: there is no such image. DigestMismatch: fetched bytes have a wrong digest.
            Unavailable: the image is not here, and its repository is unreachable.
            StorageFull: it does not fit, even after the eviction of all unused images.
            ImageRejected: no trusted key signed it.
        """
        with self._hold_lease(digest), raise_storage_full():
            return self._find(digest, progress) or self._fetch(digest, progress)

    @contextmanager
    def lease(
        self, digest: str, progress: ProgressCallback | None = None, lazy: LazyStart | None = None
    ) -> Iterator[BootImage]:
        """As :meth:`prepare`; the image is not evicted while the context lasts.

        lazy: see :class:`vmjobs.agent.image_source.ImageSource`; ignored unless ``lazy_start`` is set.
        """
        with ExitStack() as stack:
            lease = stack.enter_context(self._hold_lease(digest))
            self._count_lease(digest)
            with raise_storage_full():
                image = self._find(digest, progress)
                if image is None and lazy is not None and self._lazy_start:
                    image = self._start_lazily(stack, digest, progress, lazy)
                if image is None:
                    image = self._fetch(digest, progress)
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

    def close(self, timeout: float = 10.0) -> None:
        """Stop the fetches of lazy starts, which note their progress. timeout: seconds for each."""
        with self._lock:
            self._closed = True
            running = [fetch.thread for fetch in self._fetches.values()]
        for thread in running:
            thread.join(timeout)

    def _count_lease(self, digest: str) -> None:
        here = self._store.complete(digest)
        with self._lock:
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

    def _find(self, digest: str, progress: ProgressCallback | None) -> BootImage | None:
        """The image, if it is trusted; None: it is missing or damaged, and a fetch repairs both."""
        if self._trust is not None:
            self._require_trust(digest, self._trust)
        with suppress(NotFound, DigestMismatch):
            return self._store.prepare(digest, progress)
        return None

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

    # ------------------------------------------------------------------ whole images

    def _fetch(self, digest: str, progress: ProgressCallback | None) -> BootImage:
        for _ in range(_MAX_ATTEMPTS - 1):
            self._fetch_parts(digest, progress)
            with suppress(NotFound, DigestMismatch):
                return self._store.prepare(digest)
        self._fetch_parts(digest, progress)
        return self._store.prepare(digest)

    def _fetch_parts(
        self, digest: str, progress: ProgressCallback | None, *, without_root: bool = False
    ) -> ImageManifest:
        try:
            manifest = self._store.manifest(digest)
        except (NotFound, DigestMismatch):
            manifest = ImageManifest.parse(self._fetcher.manifest(digest), digest)
        self._eviction.ensure_free(MIB)
        self._eviction.add_manifest(manifest)
        for part, on_progress in track_parts(manifest, progress):
            if not without_root or part.digest != manifest.root.digest:
                ContentFetch(
                    self._store.folder, self._eviction, self._fetcher, digest, part, on_progress
                ).run()
        return manifest

    # ------------------------------------------------------------------ lazy start

    def _start_lazily(
        self, stack: ExitStack, digest: str, progress: ProgressCallback | None, lazy: LazyStart
    ) -> BootImage | None:
        """An image whose root disk is being fetched; None: it is complete or fetched elsewhere."""
        manifest = self._fetch_parts(digest, progress, without_root=True)
        root, folder = manifest.root, self._store.folder
        fetch = stack.enter_context(self._read_along(digest, root))
        while not fetch.settled.wait(_CHECK_SECONDS):
            if progress is not None:
                progress(0, manifest.size)
        if not fetch.is_readable:
            if fetch.failure is not None:
                raise fetch.failure
            return None
        stack.enter_context(fetch.report_failure(lazy.failed))

        def on_disconnect() -> None:
            lazy.failed(HypervisorError("the process that serves the root disk ended"))

        stack.enter_context(serve_disk(lazy.socket, fetch, on_disconnect))
        files = {part.digest: folder.path(part.digest) for part in manifest.parts()}
        image = make_boot_image(digest, manifest, files | {root.digest: folder.partial(root.digest)})
        disk = LazyDisk(
            lazy.socket.absolute(),
            root.size,
            fetch_rest=fetch.fetch_rest_now,
            is_waiting=fetch.is_waiting,
            waited=fetch.waited,
        )
        return replace(image, live=disk)

    @contextmanager
    def _read_along(self, image: str, root: Part) -> Iterator[LazyFetch]:
        """The fetch of a root disk, with one more reader while the context lasts."""
        with self._lock:
            fetch = self._fetches.get(root.digest)
            if fetch is None or fetch.failure is not None:
                fetch = self._fetches[root.digest] = LazyFetch(
                    self._store.folder,
                    self._eviction,
                    self._fetcher,
                    image,
                    root,
                    self._check_closed,
                    patience=self._patience,
                    readers=1,
                )
                fetch.thread = threading.Thread(
                    target=self._run_fetch, args=(fetch,), name="filling", daemon=True
                )
                fetch.thread.start()
            else:
                fetch.readers += 1
        try:
            yield fetch
        finally:
            with self._lock:
                fetch.readers -= 1

    def _run_fetch(self, fetch: LazyFetch) -> None:
        digest = fetch.part.digest
        try:
            with self._eviction.hold_lease(fetch.image):
                fetch.run()
        except (VMJobsError, OSError) as error:
            log.warning("fetch of the root disk %s failed: %s", digest, error)
            fetch.fail(error)
        except Exception as error:
            log.exception("fetch of the root disk %s failed", digest)
            fetch.fail(error)
        finally:
            with self._lock:
                if self._fetches.get(digest) is fetch:
                    del self._fetches[digest]
            fetch.settled.set()
        if isinstance(fetch.failure, StorageFull):
            self._eviction.remove_incomplete(fetch.image)

    def _check_closed(self, _done: int) -> None:
        if self._closed:
            raise Unavailable("image", "the process is shutting down")
