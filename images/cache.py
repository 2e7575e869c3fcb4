"""A node's image cache: fetches images once, verifies them, and stores sparse files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from images.fetch import ContentFetch
from images.files import exclusive, write_atomically
from images.manifest import ImageManifest, Part
from images.remote import Counting, ImageFetcher
from images.room import Room, full, is_full
from images.store import ImageStore, checked_digest, shifted
from vmjobs.errors import DigestMismatch, ImageRejected, NotFound, StorageFull
from vmjobs.hypervisor.base import BootImage
from vmjobs.model import MIB
from vmjobs.ports import Progress

#: Checks an image's digest and signatures; raises :class:`vmjobs.errors.ImageRejected`.
Trust = Callable[[str, str], object]

#: Attempts to fetch an image: other processes may evict or damage it meanwhile.
_TRIES: Final = 3


class ImageCache:
    """An :class:`vmjobs.ports.ImageSource` that fetches missing images.

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
        trust: Trust | None = None,
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)  # not every user may read every image
        self._store = ImageStore(root)
        self._fetch = Counting(fetch)
        self._room = Room(self._store, limit, keep_free)
        self._trust = trust
        self.hits = self.misses = 0
        self._counting = threading.Lock()

    def prepare(self, digest: str, progress: Progress | None = None) -> BootImage:
        """Fetch the image if it is not here, verify it, and return its files.

        Raises:
            NotFound: there is no such image. DigestMismatch: fetched bytes have a wrong digest.
            Unavailable: the image is not here, and its repository is unreachable.
            StorageFull: it does not fit, even after the eviction of all unused images.
            ImageRejected: no trusted key signed it.
        """
        with self._held(digest):
            return self._prepare(digest, progress)

    @contextmanager
    def lease(self, digest: str, progress: Progress | None = None) -> Iterator[BootImage]:
        """As :meth:`prepare`; the image is not evicted while the context lasts."""
        with self._held(digest) as lease:
            self._count(digest)
            image = self._prepare(digest, progress)
            self._room.touch(lease)
            try:
                yield image
            finally:
                self._room.touch(lease)

    def cached(self) -> list[str]:
        """Digests of the images that are complete in the cache."""
        return self._store.cached()

    def fetched(self, digest: str) -> int:
        """Bytes of an image's contents that this process has fetched so far."""
        return self._fetch.fetched(digest)

    def used(self) -> int:
        """Bytes of disk that images take."""
        return self._room.used()

    def _count(self, digest: str) -> None:
        here = self._store.complete(digest)
        with self._counting:
            self.hits += here
            self.misses += not here

    @contextmanager
    def _held(self, digest: str) -> Iterator[int]:
        checked_digest(digest)
        try:
            with self._room.leased(digest) as lease:
                yield lease
        except StorageFull:
            self._room.drop_incomplete(digest)
            raise

    def _prepare(self, digest: str, progress: Progress | None) -> BootImage:
        with full_disk():
            return self._prepared(digest, progress)

    def _prepared(self, digest: str, progress: Progress | None) -> BootImage:
        if self._trust is not None:
            self._require_trust(digest, self._trust)
        with suppress(NotFound, DigestMismatch):  # missing or damaged: a fetch repairs both
            return self._store.prepare(digest, progress)
        for _ in range(_TRIES - 1):
            self._fetch_image(digest, progress)
            with suppress(NotFound, DigestMismatch):
                return self._store.prepare(digest)
        self._fetch_image(digest, progress)
        return self._store.prepare(digest)

    def _require_trust(self, digest: str, trust: Trust) -> None:
        """Refuse an image without a trusted key's signature; cache its signatures."""
        path = self._room.signature_path(digest)
        try:
            trust(digest, path.read_text("ascii"))
        except (FileNotFoundError, UnicodeDecodeError, ImageRejected):
            # The image is new here, it has another signature now, or the trusted keys changed.
            signature = self._fetch.signature(digest)
            trust(digest, signature)
            write_atomically(path, signature.encode("ascii"), self._store.folder.temporary)

    def _fetch_image(self, digest: str, progress: Progress | None) -> None:
        manifest = self._manifest(digest)
        self._room.claim(MIB)
        self._room.expect(manifest)
        done = 0
        for part in manifest.parts():
            step = shifted(progress, done, manifest.size)
            lock = self._store.folder.lock(part.digest)
            with exclusive(lock, waiting=partial(step, 0)):
                self._have(digest, part, step)
            done += part.size
            step(part.size)

    def _have(self, image: str, part: Part, step: Callable[[int], None]) -> None:
        folder = self._store.folder
        try:
            folder.verified(part.digest, part.size, step)
        except (NotFound, DigestMismatch):
            ContentFetch(folder, self._room, self._fetch, image, part, step).run()

    def _manifest(self, digest: str) -> ImageManifest:
        try:
            return self._store.manifest(digest)
        except (NotFound, DigestMismatch):
            return ImageManifest.parse(self._fetch.manifest(digest), digest)


@contextmanager
def full_disk() -> Iterator[None]:
    """Raise StorageFull in place of each OSError that means a full disk."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise full(error) from error
