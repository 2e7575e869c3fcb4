"""A node's image cache: images fetched once, verified, kept sparse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from images.content import SEGMENT, Layout
from images.files import exclusive, temporary, write_all
from images.manifest import ImageManifest, Part
from images.segment import unpack
from images.store import ImageStore, checked_digest
from vmjobs.errors import DigestMismatch, NotFound
from vmjobs.hypervisor.base import BootImage
from vmjobs.ports import Progress


class ImageFetcher(Protocol):
    """Where images come from; the client library has one that speaks to the repository."""

    def manifest(self, digest: str) -> bytes:
        """The manifest's exact bytes. Raises NotFound or Unavailable."""

    def layout(self, image: str, content: str) -> bytes:
        """The layout of one of an image's contents. Raises NotFound or Unavailable."""

    def segment(self, image: str, segment: bytes) -> bytes:
        """A stored segment, by its digest's 32 bytes. Raises NotFound or Unavailable."""


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
            done = 0
            for part in manifest.parts():
                self._have(digest, part)
                done += part.size
                if progress is not None:
                    progress(done, manifest.size)
            self._store.put_manifest(manifest)
        return self._store.prepare(digest, progress)

    @contextmanager
    def lease(self, digest: str, progress: Progress | None = None) -> Iterator[BootImage]:
        """As :meth:`prepare`."""
        yield self.prepare(digest, progress)

    def cached(self) -> list[str]:
        """Digests of the images that are here, complete."""
        return self._store.cached()

    def _manifest(self, digest: str) -> ImageManifest:
        try:
            return self._store.manifest(digest)
        except (NotFound, DigestMismatch):
            return ImageManifest.parse(self._fetch.manifest(digest), digest)

    def _have(self, image: str, part: Part) -> None:
        folder = self._store.folder
        with exclusive(self._store.root / "locks" / part.digest.removeprefix("tree:")):
            try:
                folder.verified(part.digest, part.size)
            except (NotFound, DigestMismatch):
                pass
            else:
                return
            layout = Layout.parse(self._fetch.layout(image, part.digest), part.digest)
            with temporary(folder.temporary) as (file, path):
                os.ftruncate(file.fileno(), layout.size)
                for number, digest in layout.stored():
                    data = unpack(self._fetch.segment(image, digest), digest)
                    write_all(file.fileno(), data, number * SEGMENT)
                folder.adopt(file, path, layout)
