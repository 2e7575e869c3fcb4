"""The node's cache with the real API: kills, lost connections, wrong bytes, full disks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from images.cache.node_cache import ImageCache
from images.content import CHUNK_BYTES, SEGMENT_BYTES
from images.signature import require_signed, sign
from tests.kit import KIT, ROOT
from tests.kit.api_site import make_site, serving
from tests.kit.lazy_images import DEADLINE, PATIENT, QUICK, Gate, Place, place_at
from tests.kit.noise import noise
from tests.kit.repository_jobs import ADMIN
from tests.kit.sockets import free_port
from tests.kit.waiting import wait_until
from vmjobs.client import ImageClient, Retries
from vmjobs.errors import DigestMismatch, ImageRejected, Unavailable


def child(place: Place, *images: str, tmpfs: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start a process that fetches these images. tmpfs: mount options of its caches."""
    command = [
        sys.executable,
        str(KIT / "node_cache_child.py"),
        str(place.root),
        place.url,
        place.token,
        *images,
    ]
    if tmpfs:
        place.root.mkdir(exist_ok=True)
        flags = [] if os.geteuid() == 0 else ["--map-root-user"]
        command = ["unshare", "--mount", *flags, *command, *(f"--tmpfs={each}" for each in tmpfs)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def said(child: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Return a child's output; check that it exits with 0."""
    out, _ = child.communicate(timeout=DEADLINE)
    assert child.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_at(tmp_path) as place:
        yield place


def has_open(pid: int, root: Path) -> bool:
    """Whether a process has files open below a directory."""
    return any(Path(root) in path.resolve().parents for path in Path(f"/proc/{pid}/fd").iterdir())


def kept(root: Path) -> int:
    """Return the disk space of partial images, in bytes."""
    return sum(path.stat().st_blocks * 512 for path in root.glob("partial/*") if not path.suffix)


def test_a_node_fetches_an_image_once(place: Place) -> None:
    disk = noise(3 * SEGMENT_BYTES) + bytes(2 * SEGMENT_BYTES) + b"end"
    digest = place.push(disk)
    cache = place.plain()
    image = cache.prepare(digest)
    assert image.root.read_bytes() == disk
    assert image.kernel is not None
    assert image.kernel.read_bytes() == b"a kernel"
    assert set(place.gate.ranges.values()) == {1}
    assert len(place.gate.ranges) == 5
    assert place.plain().prepare(digest) == image
    assert sum(place.gate.ranges.values()) == 5


def test_two_processes_at_once_fetch_once(place: Place) -> None:
    disk = noise(8 * SEGMENT_BYTES)
    digest = place.push(disk)
    place.gate.let = 2
    nodes = [child(place, digest) for _ in range(2)]
    place.gate.wait_until(lambda: place.gate.let == 0)
    wait_until(lambda: all(has_open(node.pid, place.root) for node in nodes))
    place.gate.open()
    for node in nodes:
        assert said(node)[0]["size"] == len(disk)
    assert set(place.gate.ranges.values()) == {1}
    assert place.plain().prepare(digest).root.read_bytes() == disk


def test_a_node_that_is_killed_again_and_again_gets_there(place: Place) -> None:
    """After kill -9 in the middle of a fetch, the next one fetches only what is missing."""
    disk = noise(16 * SEGMENT_BYTES)
    digest = place.push(disk)
    for number in range(1, 4):
        # The killed process's requests, at most four, are still waiting.
        place.gate.let = 3 + 4
        node = child(place, digest)
        wait_until(lambda least=3 * number * SEGMENT_BYTES: kept(place.root) >= least)  # type: ignore[misc]
        node.kill()
        assert node.wait(DEADLINE) == -signal.SIGKILL
    assert place.plain().cached() == []
    there = kept(place.root) // SEGMENT_BYTES
    assert there >= 9
    place.gate.ranges.clear()
    place.gate.open()
    [told] = said(child(place, digest))
    assert Path(told["root"]).read_bytes() == disk
    assert told["left"] == []
    # Fetched again: at most one half-written segment per kill, and the four waiting ones.
    assert sum(place.gate.ranges.values()) <= 17 - there + 3 + 4


def test_a_node_that_is_told_to_end_does_not_wait_for_a_silent_repository(place: Place) -> None:
    digest = place.push(noise(6 * SEGMENT_BYTES))
    place.gate.let = 2
    node = child(place, digest)
    wait_until(lambda: kept(place.root) >= 2 * SEGMENT_BYTES)
    node.send_signal(signal.SIGINT)
    assert node.wait(DEADLINE / 3) != 0  # far below the timeout for a silent peer
    place.gate.open()
    assert kept(place.root) == 2 * SEGMENT_BYTES
    [note] = place.root.glob("partial/*.note")
    assert json.loads(note.read_bytes())["have"]


def test_a_repository_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    """The client retries, then fails with a clear reason; the next fetch reuses partial data."""
    disk = noise(8 * SEGMENT_BYTES)
    site = make_site(tmp_path / "site")
    gate = Gate(site.app, let=5)
    token = site.issuer.node_token("n1")
    port = free_port()
    with serving(gate, port) as url:
        place = Place(site, gate, url, tmp_path / "node", token, QUICK)
        digest = place.push(disk)
        failure: list[Exception] = []

        def fetch() -> None:
            try:
                place.plain().prepare(digest)
            except Unavailable as error:
                failure.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        wait_until(lambda: kept(place.root) >= 5 * SEGMENT_BYTES)
        gate.away = True  # current and later requests fail
        gate.open()
        thread.join(DEADLINE)
    with pytest.raises(Unavailable, match="cannot reach the API"):
        place.plain().prepare(digest)
    assert "503" in str(failure[0])
    gate.away, gate.bytes, place.retries = False, 0, PATIENT
    with serving(gate, port):
        assert place.plain().prepare(digest).root.read_bytes() == disk
    assert gate.bytes < 3 * SEGMENT_BYTES + 10 * CHUNK_BYTES


def test_connections_that_break_in_the_middle_of_a_segment(place: Place) -> None:
    """A segment resumes where it broke off: each byte is sent once."""
    disk = noise(3 * SEGMENT_BYTES)
    digest = place.push(disk)
    pieces = 0

    def cut() -> bool:
        nonlocal pieces
        pieces += 1
        return pieces % 10 == 0

    place.gate.cut = cut
    fetcher = ImageClient(
        place.url, place.token, retries=Retries(deadline=DEADLINE, first=0.05, ceiling=0.5)
    )
    assert ImageCache(place.root, fetcher).prepare(digest).root.read_bytes() == disk
    assert pieces > 20
    assert place.gate.bytes < 3 * SEGMENT_BYTES * 1.2 + 10 * CHUNK_BYTES


def test_an_answer_without_end_is_not_read_to_its_end(place: Place) -> None:
    digest = place.push(noise(CHUNK_BYTES))

    def endless(_environ: dict[str, Any], start: Any) -> Iterator[bytes]:
        start("200 OK", [("Content-Length", str(64 * 1024**3))])
        return (bytes(1024 * 1024) for _ in range(64 * 1024))

    place.gate.app = lambda environ, start: (
        endless if "/segments/" in environ["PATH_INFO"] else place.site.app
    )(environ, start)
    with pytest.raises(DigestMismatch, match="has more than"):
        place.plain().prepare(digest)
    assert place.gate.bytes < 64 * 1024 * 1024


def test_something_on_the_way_knows_of_no_ranges(place: Place) -> None:
    disk = noise(3 * SEGMENT_BYTES)
    changed = disk[:-1] + b"!"
    first, second = place.push(disk), place.push(changed)
    app = place.site.app

    def without_ranges(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        environ.pop("HTTP_RANGE", None)
        return app(environ, start)

    place.gate.app = without_ranges
    cache = place.plain()
    cache.prepare(first)
    assert cache.prepare(second).root.read_bytes() == changed


def test_a_full_disk(place: Place) -> None:
    """The cache evicts other images if that frees enough; if not, it leaves nothing behind."""
    first, second = place.push(noise(3 * SEGMENT_BYTES)), place.push(noise(3 * SEGMENT_BYTES, 1))
    large = place.push(noise(6 * SEGMENT_BYTES, 2))
    told = said(child(place, first, second, large, first, tmpfs=["size=40m"]))
    assert told[0]["cached"] == [first]
    assert told[1]["cached"] == [second]
    assert told[2]["error"] == "STORAGE_FULL"
    assert "does not fit onto this node" in told[2]["message"]
    assert (told[2]["left"], told[2]["cached"]) == ([], [])
    assert told[3]["cached"] == [first]


def test_a_disk_without_room_for_another_file(place: Place) -> None:
    """The file system runs out of inodes, each time at another point."""
    first, second = place.push(noise(SEGMENT_BYTES)), place.push(noise(SEGMENT_BYTES, 1))
    disks = [f"size=100m,nr_inodes={inodes}" for inodes in range(10, 50, 4)]
    found = said(child(place, first, second, tmpfs=disks))
    assert len(found) == 2 * len(disks)
    assert {"STORAGE_FULL", None} == {told.get("error") for told in found}
    assert all(told["left"] == [] for told in found)


def test_a_node_boots_only_what_was_signed(place: Place) -> None:
    key = Ed25519PrivateKey.generate()
    keys = {"site": key.public_key()}
    unsigned = place.push(noise(CHUNK_BYTES))
    signed = place.push(noise(CHUNK_BYTES, 1))
    body = {"signature": sign(signed, key)}
    answer = place.site.admin(ADMIN.user)("PATCH", f"/v1/images/{signed}", json=body)
    assert answer.status_code == 200, answer.text
    cache = place.plain(trust=lambda digest, signature: require_signed(digest, signature, keys))
    assert cache.prepare(signed).root.read_bytes() == noise(CHUNK_BYTES, 1)
    with pytest.raises(ImageRejected, match="has no signature"):
        cache.prepare(unsigned)
    assert cache.cached() == [signed]
