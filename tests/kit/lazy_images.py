"""Shared by tests of a node's images: an API behind a gate, and a node with a cache."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from images.cache.node_cache import ImageCache
from images.content import CHUNK_BYTES
from images.segment import header_size
from tests.kit.api_site import Site, make_site, serving
from tests.kit.repository_jobs import ADMIN, push
from tests.kit.waiting import PATIENCE
from vmjobs.agent.image_source import LazyStart
from vmjobs.client import ImageClient, Retries
from vmjobs.hypervisor.base import LazyDisk
from vmjobs.hypervisor.libvirt.nbd_plugin import LazyDiskReader

#: Seconds for short operations, on a host that has other work as well.
DEADLINE = 120.0
PATIENT = Retries(deadline=DEADLINE, first=0.05, ceiling=0.5)
#: For repositories that are away: a test waits that long for the failure.
QUICK = Retries(deadline=5.0 * PATIENCE, first=0.05, ceiling=0.5)
SEGMENT_PATH = re.compile(r".*/segments/([0-9a-f]{64})")


#: The type; a gate counts bytes in an attribute of that name.
Bytes = bytes


@dataclass
class Gate:
    """Between the API and a node: counts requests, and can hold, refuse or falsify answers.

    ranges: number of requests for each part of each segment, without heads. bytes: number sent.
    let: how many more segments are answered before requests wait. away: whether the repository is out
    of reach. withheld: segments of which only heads are sent. spoil: changes the bytes of a segment's
    part. cut: whether the connection has to break now.
    """

    app: Any
    ranges: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: int = 0
    let: float = float("inf")
    away: bool = False
    withheld: frozenset[str] = frozenset()
    spoil: Callable[[Bytes], Bytes] = lambda data: data
    cut: Callable[[], bool] = lambda: False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[Bytes]:
        found = SEGMENT_PATH.fullmatch(environ["PATH_INFO"])
        wanted = environ.get("HTTP_RANGE", "")
        head = wanted.startswith("bytes=0-") and int(wanted.rpartition("-")[2]) < header_size(128)
        if found:
            with self.changed:
                assert self.changed.wait_for(lambda: self.let > 0, DEADLINE)
                self.let -= 1
                self.changed.notify_all()
        if self.away or (found and found[1] in self.withheld and not head):
            start("503 Service Unavailable", [("Content-Length", "0")])
            return []
        if not found:
            return self.app(environ, start)  # type: ignore[no-any-return]
        with self.changed:
            if not head:
                self.ranges[found[1], wanted] += 1
        environ.pop("wsgi.file_wrapper", None)
        return self._counted(self.app(environ, start), environ["werkzeug.socket"], head)

    def open(self) -> None:
        """Let all requests through."""
        with self.changed:
            self.let = float("inf")
            self.changed.notify_all()

    def wait_until(self, what: Callable[[], bool]) -> None:
        """Wait for a condition that becomes true with a request."""
        with self.changed:
            assert self.changed.wait_for(what, DEADLINE)

    def _counted(self, body: Any, connection: socket.socket, head: bool) -> Iterator[Bytes]:
        try:
            for piece in body:
                if self.cut():
                    connection.shutdown(socket.SHUT_RDWR)
                    return
                with self.changed:
                    self.bytes += len(piece)
                yield piece if head else self.spoil(piece)
        finally:
            if hasattr(body, "close"):
                body.close()


@dataclass
class Place:
    """A site behind a gate, and a directory for a node."""

    site: Site
    gate: Gate
    url: str
    folder: Path
    token: str
    retries: Retries = PATIENT

    @property
    def root(self) -> Path:
        return self.folder / "images"

    def push(self, disk: bytes) -> str:
        return push(self.site.repository, ADMIN, disk, b"a kernel").digest

    def plain(self, **more: Any) -> ImageCache:
        """The node's cache as an ordinary one, without lazy start."""
        return ImageCache(self.root, self.fetcher(), **more)

    def cache(self, **more: Any) -> ImageCache:
        return ImageCache(self.root, self.fetcher(), lazy_start=True, **more)

    def fetcher(self) -> ImageClient:
        """The API's client, as the node uses it."""
        return ImageClient(self.url, self.token, retries=self.retries)


@contextmanager
def place_at(directory: Path) -> Iterator[Place]:
    """Make a site and a node below a directory."""
    site = make_site(directory / "site")
    gate = Gate(site.app)
    node = directory / "node"
    node.mkdir()
    with serving(gate) as url:
        yield Place(site, gate, url, node, site.issuer.node_token("n1"))


@dataclass
class Machine:
    """A VM's access to its root disk through the block server."""

    live: LazyDisk
    disk: LazyDiskReader
    errors: list[Exception]

    def read(self, offset: int, length: int) -> bytes:
        """Read some bytes. Raises OSError."""
        buffer = bytearray(length)
        self.disk.read(buffer, offset)
        return bytes(buffer)

    def read_all(self) -> bytes:
        size, step = self.disk.size, CHUNK_BYTES
        return b"".join(self.read(at, min(step, size - at)) for at in range(0, size, step))


@contextmanager
def machine(cache: ImageCache, digest: str, socket: Path) -> Iterator[Machine]:
    """A VM of an image that is not completely fetched."""
    errors: list[Exception] = []
    with cache.lease(digest, lazy=LazyStart(socket, errors.append)) as image:
        assert image.live is not None
        assert image.live.socket == socket
        yield Machine(image.live, LazyDiskReader(str(socket)), errors)
