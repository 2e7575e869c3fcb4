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

from images.cache import ImageCache, full_disk
from images.files import exclusive, free
from images.lazy.fetch import LiveFetch
from images.lazy.service import serving
from images.manifest import ImageManifest
from images.store import boot_image
from vmjobs.errors import (
    DigestMismatch,
    HypervisorError,
    NotFound,
    StorageFull,
    Unavailable,
    VMJobsError,
)
from vmjobs.hypervisor.base import LiveDisk
from vmjobs.model import MIB
from vmjobs.ports import LiveImage, Progress

log = logging.getLogger(__name__)

#: Called with the error that makes an image unusable for a VM that runs from it.
Failed = Callable[[Exception], object]

#: Interval of checks whether an image is still wanted, in seconds.
_LOOK_SECONDS: Final = 0.2


class Filling:
    """Fetches a root disk in a thread, for all its readers in this process.

    The fetch goes on without readers, so that the image becomes complete, unless the repository is
    unreachable then.
    """

    def __init__(self, start: Callable[[Filling], None], digest: str) -> None:
        self.digest = digest
        self.fetch: LiveFetch | None = None
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._users: list[Failed] = []
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
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return self._started and not self._thread.is_alive()

    @property
    def wanted(self) -> bool:
        """Whether there are readers."""
        return bool(self._users)

    def tell(self, error: Exception) -> None:
        """Notify all readers of a failure. Only the first call has an effect."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            users = list(self._users)
        for failed in users:
            failed(error)

    @contextmanager
    def used(self, failed: Failed) -> Iterator[None]:
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
class _Listener:
    """Passes failures on once the VM reads the disk; before, ``live`` raises them."""

    failed: Failed
    reads: bool = False

    def __call__(self, error: Exception) -> None:
        if self.reads:
            self.failed(error)


class LiveCache(ImageCache):
    """An :class:`images.cache.ImageCache` and a :class:`vmjobs.ports.LiveSource`.

    patience: seconds for which a VM waits for an unreachable repository.
    """

    def __init__(self, *args: Any, patience: float = 1800.0, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._patience = patience
        self._lock = threading.Lock()
        self._fillings: dict[str, Filling] = {}
        self._stopped = False

    @contextmanager
    def live(
        self, digest: str, socket: Path, failed: Failed, progress: Progress | None = None
    ) -> Iterator[LiveImage]:
        """See :class:`vmjobs.ports.LiveSource`. Raises as :meth:`lease` does."""
        with ExitStack() as stack:
            lease = stack.enter_context(self._held(digest))
            self._count(digest)
            listener = _Listener(failed)
            with full_disk():
                begun = self._begin(stack, listener, digest, progress)
            if begun is None:
                image = LiveImage(self._prepare(digest, progress))
            else:
                image = self._serve(stack, *begun, socket, listener)
            self._room.touch(lease)
            try:
                yield image
            finally:
                self._room.touch(lease)

    def close(self, timeout: float = 10.0) -> None:
        """Stop all fetches, which note their progress. timeout: seconds for each."""
        with self._lock:
            self._stopped = True
            fillings = list(self._fillings.values())
        for filling in fillings:
            filling.join(timeout)

    # ------------------------------------------------------------------ fetching

    def _begin(
        self, stack: ExitStack, listener: _Listener, digest: str, progress: Progress | None
    ) -> tuple[Filling, ImageManifest] | None:
        """Start a background fetch; None: it is complete or fetched elsewhere."""
        if self._trust is not None:
            self._require_trust(digest, self._trust)
        with suppress(NotFound, DigestMismatch):
            self._store.prepare(digest, progress)
            return None
        manifest = self._manifest(digest)
        self._room.claim(MIB)
        self._room.expect(manifest)

        def wanted(_done: int = 0) -> None:
            if progress is not None:
                progress(0, manifest.size)

        for part in manifest.parts():
            if part.digest != manifest.root.digest:
                with exclusive(self._store.folder.lock(part.digest), waiting=wanted):
                    self._have(digest, part, wanted)
        filling = self._filling(digest, manifest)
        stack.enter_context(filling.used(listener))
        filling.start()
        while not filling.settled.wait(_LOOK_SECONDS):
            wanted()
        if filling.fetch is None and filling.error is not None:
            raise filling.error
        return (filling, manifest) if filling.fetch is not None else None

    def _filling(self, image: str, manifest: ImageManifest) -> Filling:
        with self._lock:
            content = manifest.root.digest
            found = self._fillings.get(content)
            if found is None or found.ended or found.error is not None:
                fill = partial(self._fill, image=image, manifest=manifest)
                found = self._fillings[content] = Filling(fill, content)
            return found

    def _fill(self, filling: Filling, *, image: str, manifest: ImageManifest) -> None:
        try:
            with (
                self._room.leased(image),
                free(self._store.folder.lock(manifest.root.digest)) as alone,
            ):
                if alone:
                    self._fetch_live(filling, image, manifest)
        except (VMJobsError, OSError) as error:
            log.warning("fetch of the root disk %s failed: %s", manifest.root.digest, error)
            filling.tell(error)
        except Exception as error:
            log.exception("fetch of the root disk %s failed", manifest.root.digest)
            filling.tell(error)
        finally:
            with self._lock:
                if self._fillings.get(filling.digest) is filling:
                    del self._fillings[filling.digest]
            filling.settled.set()
        if isinstance(filling.error, StorageFull):
            self._room.drop_incomplete(image)

    def _fetch_live(self, filling: Filling, image: str, manifest: ImageManifest) -> None:
        folder, part = self._store.folder, manifest.root
        with suppress(NotFound, DigestMismatch):
            folder.verified(part.digest, part.size)
            return

        def begun() -> None:
            filling.fetch = fetch
            filling.settled.set()

        fetch = LiveFetch(
            folder,
            self._room,
            self._fetch,
            image,
            part,
            self._step,
            patience=self._patience,
            failed=filling.tell,
            wanted=lambda: filling.wanted,
            begun=begun,
        )
        fetch.run()
        log.info("the root disk %s is complete", part.digest)

    def _step(self, _done: int) -> None:
        if self._stopped:
            raise Unavailable("image", "the process is shutting down")

    # ------------------------------------------------------------------ in use

    def _serve(
        self,
        stack: ExitStack,
        filling: Filling,
        manifest: ImageManifest,
        socket: Path,
        listener: _Listener,
    ) -> LiveImage:
        fetch, folder = filling.fetch, self._store.folder
        if fetch is None:  # unreachable: _start_fetch has checked it
            raise HypervisorError("the root disk is not being fetched")
        files = {part.digest: folder.path(part.digest) for part in manifest.parts()}
        files[manifest.root.digest] = folder.partial(manifest.root.digest)
        image = boot_image(manifest.digest, manifest, files)

        def lost() -> None:
            listener(HypervisorError("the process that serves the root disk ended"))

        listener.reads = True
        if filling.error is not None:
            raise filling.error
        stack.enter_context(serving(socket, fetch, manifest.root.size, lost))
        return LiveImage(
            image=replace(image, live=LiveDisk(socket.absolute(), manifest.root.size)),
            ready=fetch.hurry,
            waiting=lambda: fetch.waiting,
            waited=lambda: fetch.waited,
        )
