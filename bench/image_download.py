"""Benchmark 5: segments from the API against the same files from a plain sendfile server.

The API may know from the turn before where the segments are, as when many nodes fetch one image. Files
are in the page cache on both sides.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from api.tokens import make_issuer
from bench.api_service import Service, service
from bench.figures import Finding, compare, in_turns
from bench.image_upload import RAW, make_disk
from images.cache.node_cache import ImageCache
from images.content import ContentLayout
from images.manifest import ImageManifest
from vmjobs.client import ImageClient
from vmjobs.client.images import Images

MIB = 1024 * 1024
DISK_MIB = 512
#: Connections at once, as many as a node has; bytes in a range.
AT_ONCE = 4
RANGE = 2 * MIB

#: A path and, for a range, its first and last byte.
Wish = tuple[str, tuple[int, int] | None]


def image_download(pairs: int) -> Iterator[Finding]:
    """Compare whole segments, ranges of them, and an image as a node fetches it."""
    with tempfile.TemporaryDirectory(prefix="vmjobs-bench-") as name:
        home = Path(name)
        disk = home / "disk.img"
        make_disk(disk, DISK_MIB)
        with service(home / "service") as api:
            api.vmjobs("image", "push", disk, "disk", *RAW)
            issuer, turns = make_issuer(api.config), count()

            def mint() -> str:
                return issuer.node_token(f"bench{next(turns)}")

            token = mint()
            with Images(api.url, token) as images:
                digest = images.detail("bench/disk").digest
            sizes = mirror(api, token, digest, home / "plain")
            whole: list[Wish] = [(path, None) for path in sizes]
            parts: list[Wish] = [
                (path, (at, min(at + RANGE, size) - 1))
                for path, size in sizes.items()
                for at in range(0, size, RANGE)
            ]
            ways: dict[str, Callable[[str], float]] = {
                "segments": lambda url: fetch(url, mint(), whole),
                f"segments in ranges of {RANGE // MIB} MiB": lambda url: fetch(url, mint(), parts),
                f"an image of {DISK_MIB} MiB, as a node": lambda url: as_a_node(
                    url, mint(), digest, home
                ),
            }
            about = {"bytes": sum(sizes.values()), "objects": len(sizes), "connections": AT_ONCE}
            with plain_server(home / "plain") as plain:
                for what, way in ways.items():
                    way(api.url), way(plain)  # not counted
                    times = in_turns(pairs, partial(way, api.url), partial(way, plain))
                    yield compare(
                        5,
                        f"{what} / plain sendfile server",
                        times,
                        0.9,
                        measure="MB/s / MB/s",
                        at_most=False,
                        details=about,
                    )


def mirror(api: Service, token: str, digest: str, target: Path) -> dict[str, int]:
    """Write an image to plain files at the API's own paths; returns the segments' sizes."""
    client = ImageClient(api.url, token)
    data = client.manifest(digest)
    of = f"/v1/images/{digest}"
    files = {f"{of}/manifest": data}
    sizes: dict[str, int] = {}
    for part in ImageManifest.parse(data, digest).parts():
        layout = ContentLayout.parse(client.layout(digest, part.digest), part.digest)
        files[f"{of}/contents/{part.digest}/layout"] = layout.to_bytes()
        for _, segment in layout.stored():
            body = client.segment(digest, segment)
            files[f"{of}/segments/{segment.hex()}"] = body
            sizes[f"{of}/segments/{segment.hex()}"] = len(body)
    for path, body in files.items():
        place = target / path.removeprefix("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(body)
    return sizes


@contextmanager
def plain_server(root: Path) -> Iterator[str]:
    program = Path(__file__).with_name("sendfile_server.py")
    command = [sys.executable, str(program), str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def fetch(url: str, token: str, wishes: Sequence[Wish]) -> float:
    """Fetch bytes and discard them; returns the seconds taken."""
    lanes = [wishes[lane::AT_ONCE] for lane in range(AT_ONCE)]
    began = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda lane: _fetch_some(url, token, lane), lanes))
    return time.perf_counter() - began


def _fetch_some(url: str, token: str, wishes: Sequence[Wish]) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    buffer = bytearray(MIB)
    for path, span in wishes:
        headers = {"Authorization": f"Bearer {token}"}
        if span:
            headers["Range"] = f"bytes={span[0]}-{span[1]}"
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        assert answer.status in {200, 206}, answer.status
        while answer.readinto(buffer):
            pass
    connection.close()


def as_a_node(url: str, token: str, digest: str, home: Path) -> float:
    """Fetch an image into an empty cache and verify every byte; returns the seconds taken."""
    with tempfile.TemporaryDirectory(dir=home) as cache:
        began = time.perf_counter()
        ImageCache(Path(cache), ImageClient(url, token)).prepare(digest)
        return time.perf_counter() - began
