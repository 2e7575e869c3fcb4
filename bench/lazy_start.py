"""Lazy start over fetching all first: time and bytes moved until the guest is ready."""

from __future__ import annotations

import random
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from api.tokens import make_issuer
from bench.api_service import Service, service
from bench.figures import Finding, compare, in_turns
from bench.start_overhead import empty_job, execute, step_times
from images.cache.node_cache import ImageCache
from images.content import SEGMENT_BYTES
from images.manifest import ImageManifest
from images.store.image_store import ImageStore
from tests.kit.counting_proxy import PIECE, Proxy, proxy_to
from vmjobs.agent.run.services import RunServices
from vmjobs.client import ImageClient
from vmjobs.client.images import Images
from vmjobs.model import MIB, HypervisorKind, JobSpec, JobState, NetworkMode, Report

#: Lazy start is worth enabling below this ratio.
TARGET = 0.9
#: Share of the image's bytes that may be moved before the guest is ready.
MOVED = 0.5
#: Size of the larger image's additional data, in bytes; the data cannot be compressed.
DATA = 512 * 1024 * 1024


@dataclass(frozen=True)
class Kind:
    """A line. rate: bytes per second of all connections together; delay: seconds per request."""

    name: str
    rate: float = float("inf")
    delay: float = 0.0


LINES = (Kind("loopback"), Kind("200 Mbit/s, 10 ms", 25e6, 0.010))


class Line(Proxy):
    """A proxy with the rate and delay of a line."""

    def __init__(self, server: tuple[str, int], kind: Kind) -> None:
        super().__init__(server)
        self._kind, self._free, self._turn = kind, 0.0, threading.Lock()

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := source.recv(PIECE):
                if way == "up":
                    time.sleep(self._kind.delay)
                else:
                    self._wait(len(data))
                sink.sendall(data)
                with self._changed:
                    setattr(self, way, getattr(self, way) + len(data))
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait(self, size: int) -> None:
        with self._turn:
            now = time.monotonic()
            self._free = max(self._free, now) + size / self._kind.rate
            pause = self._free - now
        time.sleep(pause)


@dataclass
class Start:
    """One start. ready, end: seconds since it began; moved: bytes until the guest was ready.

    waited: seconds for which the guest waited for its image, or the job for all of it.
    """

    ready: float = 0.0
    end: float = 0.0
    moved: int = 0
    waited: float = 0.0


class _Watch:
    """Notes when the run's guest becomes ready."""

    def __init__(self, line: Proxy, start: Start) -> None:
        self._line, self._start = line, start
        self._began, self._before = time.monotonic(), line.down

    def progress(self, report: Report) -> None:
        """RUNNING begins when the guest is ready."""
        if report.state is JobState.RUNNING:
            self._start.ready = time.monotonic() - self._began
            self._start.moved = self._line.down - self._before


def lazy_start(
    made: RunServices, store: ImageStore, ref: str, kinds: list[HypervisorKind], pairs: int
) -> Iterator[Finding]:
    """Compare on the best hypervisor that can start lazily, over each line."""
    kind = next(kind for kind in kinds if kind is not HypervisorKind.UML)
    spec = empty_job(ref, kind, NetworkMode.NONE)
    with tempfile.TemporaryDirectory(prefix="vmjobs-bench-") as directory:
        home = Path(directory)
        own = _images(home / "images", store, ref)
        with service(home / "service") as api:
            for what in (ref, f"{ref}-and-data"):
                digest, size = _published(api, own, what)
                for way in LINES:
                    with proxy_to(api.config.listen, partial(Line, kind=way)) as line:
                        client = ImageClient(line.url, make_issuer(api.config).node_token("bench"))
                        start = partial(_start, made, client, digest, spec, line, home)
                        name = f"lazy start, {spec.hypervisor}, {what}, {way.name}"
                        yield from _compare(start, pairs, name, size)


def _images(root: Path, store: ImageStore, ref: str) -> ImageStore:
    """Make a store with the image, and with a copy of it that has data behind its file system."""
    own = ImageStore(root)
    image = store.prepare(store.resolve(ref))
    if image.kernel is None or image.initrd is None:
        raise RuntimeError(f"{ref} has no kernel of its own")
    kernel, initrd = own.folder.add_file(image.kernel), own.folder.add_file(image.initrd)
    disk = root / "disk"
    shutil.copy(image.root, disk)
    noise = random.Random(0)
    for name in (ref, f"{ref}-and-data"):
        manifest = ImageManifest(
            root=own.folder.add_file(disk), kernel=kernel, initrd=initrd, cmdline=image.cmdline
        )
        own.tag(name, "latest", own.put_manifest(manifest))
        with disk.open("ab") as file:
            for _ in range(DATA // SEGMENT_BYTES if name == ref else 0):
                file.write(noise.randbytes(SEGMENT_BYTES))
    disk.unlink()
    return own


def _published(api: Service, store: ImageStore, ref: str) -> tuple[str, int]:
    """Publish the image through the API; returns its digest and size."""
    local = api.home / "local"
    local.mkdir(exist_ok=True)
    if not (local / "images").exists():
        (local / "images").symlink_to(store.root.absolute())
    api.vmjobs("image", "push", ref, f"bench-{ref}")
    with Images(api.url, make_issuer(api.config).node_token("bench")) as images:
        digest = images.detail(f"bench/bench-{ref}").digest
    return digest, store.manifest(digest).size


def _compare(start: Callable[[bool], Start], pairs: int, name: str, size: int) -> Iterator[Finding]:
    """Compare starts. start: starts once, lazily or not. size: of the image, in bytes."""
    start(True)  # not counted
    seen = in_turns(pairs, lambda: start(True), lambda: start(False))
    lazy, whole = [a for a, _ in seen], [b for _, b in seen]
    details = {
        "bytes until ready, lazy": [s.moved for s in lazy],
        "bytes until ready, whole": [s.moved for s in whole],
        "bytes of the image": size,
    }
    times = [(a.ready, b.ready) for a, b in seen]
    yield compare(0, f"{name}: ready", times, TARGET, measure="lazy / whole", details=details)
    ends = [(a.end, b.end) for a, b in seen]
    yield compare(0, f"{name}: job's end", ends, 1.0, measure="lazy / whole")
    waits = [(a.waited, b.waited) for a, b in seen]
    yield compare(0, f"{name}: waiting for the image", waits, TARGET, measure="lazy / whole")
    moved = [(s.moved / MIB, size / MIB) for s in lazy]
    what = f"{name}: bytes until ready"
    yield compare(0, what, moved, MOVED, measure="moved / image", unit="MiB")


def _start(
    made: RunServices,
    client: ImageClient,
    digest: str,
    spec: JobSpec,
    line: Proxy,
    home: Path,
    lazy: bool,
) -> Start:
    """Start once with an empty cache."""
    start = Start()
    with tempfile.TemporaryDirectory(dir=home) as root:
        cache = ImageCache(Path(root), client, lazy_start=lazy)
        ours = replace(made, images=cache)
        began = time.monotonic()
        with step_times() as steps:
            run = execute(ours, digest, spec, _Watch(line, start).progress)
        start.end = time.monotonic() - began
        start.waited = run.waited_for_image + sum(steps.seconds["fetch image"])
        cache.close(60)
    return start
