"""A node's image cache: images fetched once, verified, kept sparse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from images.blobs import exclusive
from images.manifest import Blob, ImageManifest
from images.store import ImageStore, checked_digest
from vmjobs.errors import DigestMismatch, NotFound
from vmjobs.hypervisor.base import BootImage
from vmjobs.ports import Progress


class ImageFetcher(Protocol):
    """Where images come from; the client library has one that speaks to the repository."""

    def manifest(self, digest: str) -> bytes:
        """The manifest's exact bytes. Raises NotFound or Unavailable."""

    def blob(
        self, image_digest: str, blob_digest: str, sink: BinaryIO, progress: Progress | None = None
    ) -> None:
        """Write one blob of an image to ``sink``. Raises NotFound or Unavailable."""


class ImageCache:
    """An :class:`vmjobs.ports.ImageSource` that fetches what it does not have.

    Several threads and processes may share ``root``: each image is fetched by one of them, the
    others wait for it. A damaged file is fetched again, a fetch that was cut off leaves nothing.
    """

    def __init__(self, root: Path, fetch: ImageFetcher) -> None:
        self._store = ImageStore(root)
        self._fetch = fetch

    def prepare(self, digest: str, progress: Progress | None = None) -> BootImage:
        """Have the image here, verified, and say where.

        Raises:
            NotFound: there is no such image. DigestMismatch: what came is not what the digest names.
            Unavailable: it had to be fetched and its repository is out of reach.
        """
        checked_digest(digest)
        try:
            return self._store.prepare(digest, progress)
        except (NotFound, DigestMismatch):
            pass  # missing, incomplete or damaged: all mended by fetching
        with exclusive(self._store.root / "locks" / digest.removeprefix("sha256:")):
            manifest = self._manifest(digest)
            total = sum(blob.size for blob in manifest.blobs())
            before = 0
            for blob in manifest.blobs():
                self._have(digest, blob, _shifted(progress, before, total))
                before += blob.size
            # The manifest comes last: what cached() lists is complete.
            self._store.put_manifest(manifest)
        return self._store.prepare(digest, progress)

    def cached(self) -> list[str]:
        """Digests of the images that are here, complete."""
        return self._store.cached()

    def _manifest(self, digest: str) -> ImageManifest:
        try:
            return self._store.manifest(digest)
        except (NotFound, DigestMismatch):
            return ImageManifest.parse(self._fetch.manifest(digest), digest)

    def _have(self, image: str, blob: Blob, on_write: Callable[[int], None] | None) -> None:
        with exclusive(self._store.root / "locks" / blob.digest.removeprefix("sha256:")):
            try:
                self._store.folder.verified(blob.digest, blob.size)
            except (NotFound, DigestMismatch):
                pass
            else:
                return
            with self._store.folder.receive(_bounded(blob, on_write)) as incoming:
                self._fetch.blob(image, blob.digest, incoming.stream)
                incoming.commit(blob.digest)


def _shifted(progress: Progress | None, before: int, total: int) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda done: progress(before + done, total)


def _bounded(blob: Blob, on_write: Callable[[int], None] | None) -> Callable[[int], None]:
    """Stop a sender that goes on for ever: no more bytes than the manifest announced."""

    def check(done: int) -> None:
        if done > blob.size:
            raise DigestMismatch(f"{blob.digest} arrived with more than its {blob.size} bytes")
        if on_write is not None:
            on_write(done)

    return check
