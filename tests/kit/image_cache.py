"""An image repository for tests of a node's cache: it counts requests and can fail."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from images.cache.node_cache import ImageCache
from images.content import CHUNK_BYTES, SEGMENT_BYTES
from images.manifest import ImageManifest
from images.store.image_store import ImageStore
from tests.kit.noise import noise
from tests.kit.segments import encode_segment
from vmjobs.errors import NotFound, Unavailable

#: Four segments: of data, of zeros, of a little data, and a short one.
DISK = (
    noise(SEGMENT_BYTES)
    + bytes(SEGMENT_BYTES)
    + bytes(CHUNK_BYTES)
    + b"x"
    + bytes(SEGMENT_BYTES - CHUNK_BYTES - 1)
    + noise(70_000, 1)
)


def put(store: ImageStore, disk: bytes = DISK, kernel: bytes = b"kernel") -> tuple[str, ImageManifest]:
    """Put an image with a kernel into ``store``; return its digest and manifest."""
    manifest = ImageManifest(
        root=store.folder.put(disk), kernel=store.folder.put(kernel), cmdline=("init=/x",)
    )
    return store.put_manifest(manifest), manifest


def damage(path: Path, offset: int = 50_000) -> None:
    """Change one byte, as a bad disk or a bad copy would."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


class Remote:
    """An ``images.transfer.remote.ImageFetcher`` that reads from a store.

    segments: those requested, in order. asked: number of requests for a signature. bytes, requests:
    sums over segments and parts of segments. before: called before each segment is returned, with the
    number of segments requested before.
    """

    def __init__(self, store: ImageStore) -> None:
        self.store = store
        self.segments: list[bytes] = []
        self.signatures: dict[str, str] = {}
        self.asked = self.bytes = self.requests = 0
        self.before: Callable[[int], None] = lambda _count: None
        self.change: Callable[[bytes], bytes] = lambda data: data
        self._lock = threading.Lock()

    def manifest(self, digest: str) -> bytes:
        return self.store.manifest(digest).canonical()

    def signature(self, digest: str) -> str:
        self.asked += 1
        return self.signatures.get(digest, "")

    def layout(self, image: str, content: str) -> bytes:
        self._check(image, content)
        return self.store.folder.layout(content).to_bytes()

    def segment(self, image: str, segment: bytes) -> bytes:
        with self._lock:
            count = len(self.segments)
            self.segments.append(segment)
        self.before(count)
        data = self.change(encode_segment(self._bytes(image, segment)))
        self._count(data)
        return data

    def segment_range(self, image: str, segment: bytes, begin: int, end: int) -> tuple[bytes, int]:
        whole = self.change(encode_segment(self._bytes(image, segment)))
        self._count(whole[begin:end])
        return whole[begin:end], len(whole)

    def _count(self, data: bytes) -> None:
        with self._lock:
            self.bytes += len(data)
            self.requests += 1

    def _bytes(self, image: str, segment: bytes) -> bytes:
        for part in self.store.manifest(image).parts():
            layout = self.store.folder.layout(part.digest)
            if segment in layout.segments:
                number = layout.segments.index(segment)
                with self.store.folder.verify(part.digest).open("rb") as file:
                    return os.pread(file.fileno(), layout.length(number), number * SEGMENT_BYTES)
        raise NotFound(f"the image {image} has no segment {segment.hex()}")

    def _check(self, image: str, content: str) -> None:
        if content not in {part.digest for part in self.store.manifest(image).parts()}:
            raise NotFound(f"the image {image} has no content {content}")


def cut_off(remote: Remote, cache: ImageCache, digest: str, after: int) -> None:
    """Fetch an image of incompressible segments and lose the connection after some of them."""
    first, arrived = len(remote.segments), threading.Event()

    def before(count: int) -> None:
        if count >= first + after:
            assert arrived.wait(30)
            raise Unavailable("api", "connection lost")

    def progress(done: int, _total: int) -> None:
        if done >= after * SEGMENT_BYTES:
            arrived.set()

    remote.before = before
    with pytest.raises(Unavailable):
        cache.prepare(digest, progress)
    remote.before = lambda _count: None
    remote.segments.clear()


def used(root: Path) -> int:
    """Disk bytes used below a directory in which files may appear and disappear meanwhile."""
    total = 0
    for path in root.rglob("*"):
        with suppress(FileNotFoundError):
            found = path.stat()
            total += found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0
    return total


def files(root: Path) -> list[str]:
    """Files below a cache's root, except the empty lock files."""
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and path.relative_to(root).parts[0] != "locks"
    )
