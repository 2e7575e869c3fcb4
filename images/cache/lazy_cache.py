"""A node's image cache that can provide an image before its root disk is complete."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from images.cache.eviction import raise_storage_full
from images.cache.lazy_fetch import LazyFetch
from images.cache.lazy_service import serve_disk
from images.cache.node_cache import ImageCache
from images.manifest import ImageManifest
from images.store.files import exclusive_lock, try_exclusive_lock
from images.store.image_store import make_boot_image
from vmjobs.agent.image_source import LazyImage
from vmjobs.errors import (
    DigestMismatch,
    HypervisorError,
    NotFound,
    StorageFull,
    Unavailable,
    VMJobsError,
)
from vmjobs.file_transfer import ProgressCallback
from vmjobs.hypervisor.base import LazyDisk
from vmjobs.model import MIB

log = logging.getLogger(__name__)

#: Called with the error that makes an image unusable for a VM that runs from it.
FailureCallback = Callable[[Exception], object]

#: Interval of checks whether an image is still wanted, in seconds.
_CHECK_SECONDS: Final = 0.2


class BackgroundFetch:
    """Fetches a root disk in a thread, for all its readers in this process.

    The fetch goes on without readers, so that the image becomes complete, unless the repository is
    unreachable then.
    """

    def __init__(self, start: Callable[[BackgroundFetch], None], digest: str) -> None:
        self.digest = digest
        self.fetch: LazyFetch | None = None
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._users: list[FailureCallback] = []
        #: Set once the disk may be read, is complete, or has failed.
        self.settled = threading.Event()
        self._thread = threading.Thread(target=start, args=(self,), name="filling", daemon=True)
        self._started = False

    def start(self) -> None:
        """Start the thread, unless it has started. Call :meth:`add_reader` first."""
        with self._lock:
            if not self._started:
                self._thread.start()
                self._started = True

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return self._started and not self._thread.is_alive()

    @property
    def wanted(self) -> bool:
        """Whether there are readers."""
        return bool(self._users)

    def fail(self, error: Exception) -> None:
        """Notify all readers of a failure. Only the first call has an effect."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            users = list(self._users)
        for failed in users:
            failed(error)

    @contextmanager
    def add_reader(self, failed: FailureCallback) -> Iterator[None]:
        """Register a reader while the context lasts. failed: called with an error."""
        with self._lock:
            self._users.append(failed)
        try:
            yield
        finally:
            with self._lock:
                self._users.remove(failed)

    def join(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for the thread to end."""
        if self._started:
            self._thread.join(timeout)


@dataclass
class _FailureListener:
    """Passes failures on once the VM reads the disk; before, ``live`` raises them."""

    failed: FailureCallback
    is_reading: bool = False

    def __call__(self, error: Exception) -> None:
        if self.is_reading:
            self.failed(error)


class LazyImageCache(ImageCache):
    """An :class:`images.cache.node_cache.ImageCache` and a ``LazyImageSource``.

    patience: seconds for which a VM waits for an unreachable repository.
    """

    def __init__(self, *args: Any, patience: float = 1800.0, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._patience = patience
        self._lock = threading.Lock()
        self._fetches: dict[str, BackgroundFetch] = {}
        self._stopped = False

    @contextmanager
    def live(
        self,
        digest: str,
        socket: Path,
        failed: FailureCallback,
        progress: ProgressCallback | None = None,
    ) -> Iterator[LazyImage]:
        """See ``LazyImageSource``. Raises as :meth:`lease` does."""
        with ExitStack() as stack:
            lease = stack.enter_context(self._hold_lease(digest))
            self._count_lease(digest)
            listener = _FailureListener(failed)
            with raise_storage_full():
                begun = self._start_fetch(stack, listener, digest, progress)
            if begun is None:
                image = LazyImage(self._prepare(digest, progress))
            else:
                image = self._serve(stack, *begun, socket, listener)
            self._eviction.touch(lease)
            try:
                yield image
            finally:
                self._eviction.touch(lease)

    def close(self, timeout: float = 10.0) -> None:
        """Stop all fetches, which note their progress. timeout: seconds for each."""
        with self._lock:
            self._stopped = True
            running = list(self._fetches.values())
        for background in running:
            background.join(timeout)

    # ------------------------------------------------------------------ fetching

    def _start_fetch(
        self,
        stack: ExitStack,
        listener: _FailureListener,
        digest: str,
        progress: ProgressCallback | None,
    ) -> tuple[BackgroundFetch, ImageManifest] | None:
        """Start a background fetch; None: it is complete or fetched elsewhere."""
        if self._trust is not None:
            self._require_trust(digest, self._trust)
        with suppress(NotFound, DigestMismatch):
            self._store.prepare(digest, progress)
            return None
        manifest = self._get_manifest(digest)
        self._eviction.ensure_free(MIB)
        self._eviction.add_manifest(manifest)

        def wanted(_done: int = 0) -> None:
            if progress is not None:
                progress(0, manifest.size)

        for part in manifest.parts():
            if part.digest != manifest.root.digest:
                with exclusive_lock(self._store.folder.lock_path(part.digest), waiting=wanted):
                    self._ensure_content(digest, part, wanted)
        background = self._get_fetch(digest, manifest)
        stack.enter_context(background.add_reader(listener))
        background.start()
        while not background.settled.wait(_CHECK_SECONDS):
            wanted()
        if background.fetch is None and background.error is not None:
            raise background.error
        return (background, manifest) if background.fetch is not None else None

    def _get_fetch(self, image: str, manifest: ImageManifest) -> BackgroundFetch:
        with self._lock:
            content = manifest.root.digest
            found = self._fetches.get(content)
            if found is None or found.has_ended or found.error is not None:
                fill = partial(self._run_fetch, image=image, manifest=manifest)
                found = self._fetches[content] = BackgroundFetch(fill, content)
            return found

    def _run_fetch(self, background: BackgroundFetch, *, image: str, manifest: ImageManifest) -> None:
        try:
            with (
                self._eviction.hold_lease(image),
                try_exclusive_lock(self._store.folder.lock_path(manifest.root.digest)) as alone,
            ):
                if alone:
                    self._fetch_lazily(background, image, manifest)
        except (VMJobsError, OSError) as error:
            log.warning("fetch of the root disk %s failed: %s", manifest.root.digest, error)
            background.fail(error)
        except Exception as error:
            log.exception("fetch of the root disk %s failed", manifest.root.digest)
            background.fail(error)
        finally:
            with self._lock:
                if self._fetches.get(background.digest) is background:
                    del self._fetches[background.digest]
            background.settled.set()
        if isinstance(background.error, StorageFull):
            self._eviction.remove_incomplete(image)

    def _fetch_lazily(self, background: BackgroundFetch, image: str, manifest: ImageManifest) -> None:
        folder, part = self._store.folder, manifest.root
        with suppress(NotFound, DigestMismatch):
            folder.verify(part.digest, part.size)
            return

        def begun() -> None:
            background.fetch = fetch
            background.settled.set()

        fetch = LazyFetch(
            folder,
            self._eviction,
            self._fetcher,
            image,
            part,
            self._check_stopped,
            patience=self._patience,
            failed=background.fail,
            wanted=lambda: background.wanted,
            begun=begun,
        )
        fetch.run()
        log.info("the root disk %s is complete", part.digest)

    def _check_stopped(self, _done: int) -> None:
        if self._stopped:
            raise Unavailable("image", "the process is shutting down")

    # ------------------------------------------------------------------ in use

    def _serve(
        self,
        stack: ExitStack,
        background: BackgroundFetch,
        manifest: ImageManifest,
        socket: Path,
        listener: _FailureListener,
    ) -> LazyImage:
        fetch, folder = background.fetch, self._store.folder
        if fetch is None:  # unreachable: _start_fetch has checked it
            raise HypervisorError("the root disk is not being fetched")
        files = {part.digest: folder.path(part.digest) for part in manifest.parts()}
        files[manifest.root.digest] = folder.partial(manifest.root.digest)
        image = make_boot_image(manifest.digest, manifest, files)

        def on_disconnect() -> None:
            listener(HypervisorError("the process that serves the root disk ended"))

        listener.is_reading = True
        if background.error is not None:
            raise background.error
        stack.enter_context(serve_disk(socket, fetch, manifest.root.size, on_disconnect))
        return LazyImage(
            image=replace(image, live=LazyDisk(socket.absolute(), manifest.root.size)),
            ready=fetch.fetch_rest_now,
            waiting=lambda: fetch.waiting,
            waited=lambda: fetch.waited,
        )
