"""Lazy start: time to a guest that is ready, and bytes moved until then, over fetching all first.

Each start has an empty cache and fetches from a real API, through a proxy that counts and that can
be as slow as a site's line.
"""

from __future__ import annotations

import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from counting_proxy import PIECE, Proxy
from figures import Finding, compare, spread
from service_kit import Service, service

from api.serve import make_issuer
from images.lazy.cache import LiveCache
from images.store import ImageStore
from vmjobs.agent.inbox import Inbox
from vmjobs.agent.run import Parts, Run
from vmjobs.client import ImageClient
from vmjobs.client.images import Images
from vmjobs.local import LocalJob
from vmjobs.model import HypervisorKind, JobSpec, JobState, NetworkMode, Report

#: Worth to be switched on below this.
TARGET = 0.9
#: Of the image's bytes, before the guest is ready.
MOVED = 0.5
#: Lines that images come by, in bytes per second; None: as fast as it goes here.
LINES = {"loopback": None, "200 Mbit/s": 25e6}


class Line(Proxy):
    """A proxy that passes on no more than so many bytes a second, of all connections together."""

    def __init__(self, server: tuple[str, int], rate: float | None) -> None:
        super().__init__(server)
        self._rate, self._free, self._turn = rate, 0.0, threading.Lock()

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE):
                self._wait(len(data))
                sink.sendall(data)
                with self._changed:
                    setattr(self, way, getattr(self, way) + len(data))
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait(self, size: int) -> None:
        if self._rate is None:
            return
        with self._turn:
            now = time.monotonic()
            self._free = max(self._free, now) + size / self._rate
            pause = self._free - now
        time.sleep(pause)


@contextmanager
def line_to(listen: str, rate: float | None) -> Iterator[Line]:
    """A line before the service that listens at ``HOST:PORT``."""
    host, _, port = listen.rpartition(":")
    made = Line((host, int(port)), rate)
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.close()
        thread.join(10)


@dataclass
class Start:
    """One start. ready, end: seconds from its begin; moved: bytes until the guest was ready."""

    ready: float = 0.0
    end: float = 0.0
    moved: int = 0


class _Watch:
    """A lease that notes when the run's guest was ready."""

    def __init__(self, line: Line, start: Start) -> None:
        self._line, self._start = line, start
        self._began, self._before = time.monotonic(), line.down

    def progress(self, report: Report) -> None:
        """RUNNING begins when the guest is ready."""
        if report.state is JobState.RUNNING:
            self._start.ready = time.monotonic() - self._began
            self._start.moved = self._line.down - self._before


def lazy_start(
    made: Parts, store: ImageStore, ref: str, kinds: list[HypervisorKind], pairs: int
) -> Iterator[Finding]:
    """Compare on the best hypervisor that can start lazily, over each line."""
    kind = next(kind for kind in kinds if kind is not HypervisorKind.UML)
    spec = JobSpec(
        image=ref, script="exit 0\n", memory=128, disk=64, hypervisor=kind, network=NetworkMode.NONE
    )
    size = store.manifest(store.resolve(ref)).size
    with tempfile.TemporaryDirectory(prefix="vmjobs-bench-") as name:
        home = Path(name)
        with service(home / "service") as api:
            digest = _published(api, store, ref)
            for what, rate in LINES.items():
                with line_to(api.config.listen, rate) as line:
                    url, token = line.url, make_issuer(api.config).node_token("bench")
                    client = ImageClient(url, token)
                    yield from _compare(made, client, digest, spec, line, home, pairs, what, size)


def _published(api: Service, store: ImageStore, ref: str) -> str:
    """The image's digest, once the API has it."""
    local = api.home / "local"
    local.mkdir()
    (local / "images").symlink_to(store.root.absolute())
    api.vmjobs("image", "push", ref, "bench-lazy")
    with Images(api.url, make_issuer(api.config).node_token("bench")) as images:
        return images.detail("bench/bench-lazy").digest


def _compare(
    made: Parts,
    client: ImageClient,
    digest: str,
    spec: JobSpec,
    line: Line,
    home: Path,
    pairs: int,
    what: str,
    size: int,
) -> Iterator[Finding]:
    seen: dict[str, list[Start]] = {"lazy": [], "whole": []}
    start_once(made, client, digest, spec, line, home, lazy=True)  # not counted
    for number in range(pairs):
        # Who goes first changes: what the one leaves to the other evens out.
        for way in ("lazy", "whole") if number % 2 else ("whole", "lazy"):
            seen[way].append(start_once(made, client, digest, spec, line, home, lazy=way == "lazy"))
    lazy, whole = seen["lazy"], seen["whole"]
    details = {
        "seconds to the end, lazy": spread([s.end for s in lazy]),
        "seconds to the end, whole": spread([s.end for s in whole]),
        "bytes until ready, lazy": [s.moved for s in lazy],
        "bytes until ready, whole": [s.moved for s in whole],
        "bytes of the image": size,
    }
    times = [(a.ready, b.ready) for a, b in zip(lazy, whole, strict=True)]
    name = f"lazy start, {spec.hypervisor}, {spec.image}, {what}"
    yield compare(0, f"{name}: ready", times, TARGET, measure="lazy / whole", details=details)
    ends = [(a.end, b.end) for a, b in zip(lazy, whole, strict=True)]
    yield compare(0, f"{name}: job's end", ends, 1.0, measure="lazy / whole")
    parts = spread([s.moved / size for s in lazy])
    yield Finding(
        0,
        f"{name}: bytes until ready",
        [s.ready for s in lazy],
        [s.ready for s in whole],
        "moved / image",
        parts.median,
        parts,
        MOVED,
    )


def start_once(
    made: Parts, client: ImageClient, digest: str, spec: JobSpec, line: Line, home: Path, *, lazy: bool
) -> Start:
    """Start once with nothing in the cache."""
    start = Start()
    with (
        tempfile.TemporaryDirectory(prefix="outputs-") as outputs,
        tempfile.TemporaryDirectory(dir=home) as root,
    ):
        cache = LiveCache(Path(root), client)
        job = LocalJob(
            job_id=f"bench-{uuid.uuid4().hex[:12]}",
            spec=spec,
            image_digest=digest,
            files={},
            output_directory=Path(outputs),
            on_report=lambda report: None,
            sinks={},
        )
        ours = replace(made, images=cache, live=cache if lazy else None)
        run = Run(job, _Watch(line, start), ours, job.job_id, uuid.uuid4().hex, Inbox())
        began = time.monotonic()
        verdict = run.execute()
        start.end = time.monotonic() - began
        cache.close(60)
    if verdict.state is not JobState.COMPLETED:
        raise RuntimeError(f"the measured job ended as {verdict.state}: {verdict.reason.message}")
    return start
