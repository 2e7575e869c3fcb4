"""Images that are read while they arrive: with the real API, protocol and nbdkit."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from images.cache import lazy_fetch
from images.content import CHUNK_BYTES, SEGMENT_BYTES
from images.manifest import ImageManifest
from tests.kit.lazy_images import DEADLINE, QUICK, Place, machine, place_at
from tests.kit.noise import noise
from tests.kit.waiting import wait_until
from vmjobs.agent.image_source import LazyStart
from vmjobs.errors import (
    DigestMismatch,
    HypervisorError,
    StorageFull,
    Unavailable,
    VMJobsError,
)
from vmjobs.hypervisor.base import LazyDisk
from vmjobs.hypervisor.libvirt import nbd_plugin, nbd_server
from vmjobs.model import MIB
from vmjobs.subprocess import run

DISK = (
    noise(3 * SEGMENT_BYTES)
    + bytes(2 * SEGMENT_BYTES)
    + noise(5 * CHUNK_BYTES)
    + bytes(CHUNK_BYTES)
    + b"the end"
)
WINDOW = lazy_fetch.WINDOW_CHUNKS * CHUNK_BYTES


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_at(tmp_path) as place:
        yield place


@pytest.fixture
def digest(place: Place) -> str:
    """Return the digest of a published image."""
    return place.push(DISK)


def test_nbdkit_serves_what_is_not_here_yet(place: Place, digest: str, tmp_path: Path) -> None:
    cache = place.cache()
    original = tmp_path / "original"
    original.write_bytes(DISK)
    errors: list[Exception] = []
    with cache.lease(digest, lazy=LazyStart(tmp_path / "s", errors.append)) as image:
        assert image.live is not None
        name = f"vmjobs-{uuid.uuid4().hex}"
        process, nbd = nbd_server.start(name, image.live, tmp_path)
        url = f"nbd+unix:///?socket={nbd}"
        try:
            assert [p.pid for p in nbd_server.find(name)] == [process.pid]
            # NBD counts in sectors; the last one is filled up with zeros.
            run(["qemu-img", "compare", "-f", "raw", "-F", "raw", original, url], timeout=DEADLINE)
            with pytest.raises(VMJobsError, match="Permission denied"):
                run(["qemu-io", "-f", "raw", "-c", "write 0 512", url], timeout=DEADLINE)
        finally:
            process.kill()
            process.wait()
        wait_until(lambda: bool(errors))
        assert isinstance(errors[0], HypervisorError)
    wait_until(lambda: cache.cached() == [digest])
    assert set(place.gate.ranges.values()) == {1}
    whole = place.plain().prepare(digest)
    assert whole.live is None
    assert whole.root.read_bytes() == DISK
    assert sum(place.gate.ranges.values()) == len(place.gate.ranges)


def test_a_little_is_read_and_little_moves(place: Place, digest: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with machine(place.cache(), digest, tmp_path / "s") as got:
        place.gate.bytes = 0
        at = 2 * SEGMENT_BYTES + 5 * CHUNK_BYTES + 1000
        assert got.read(at, 100) == DISK[at : at + 100]
        assert got.read(at + 100, CHUNK_BYTES) == DISK[at + 100 : at + 100 + CHUNK_BYTES]
        assert place.gate.bytes < 2 * WINDOW
        assert got.read(3 * SEGMENT_BYTES + 7, 4096) == bytes(4096)
        assert got.read(len(DISK) - 7, 7) == b"the end"
        assert got.live.is_waiting() is False
        assert 0 < got.live.waited() < time.monotonic() - began
        # Nothing else is fetched before the guest is ready; then everything is.
        assert place.gate.bytes < 4 * WINDOW
        got.live.fetch_rest()
        wait_until(lambda: place.plain().cached() == [digest])
        assert got.read_all() == DISK


def test_machines_share_what_comes(place: Place, digest: str, tmp_path: Path) -> None:
    cache = place.cache()
    with (
        machine(cache, digest, tmp_path / "s1") as one,
        machine(cache, digest, tmp_path / "s2") as two,
    ):
        found: dict[int, bytes] = {}
        threads = [
            threading.Thread(target=lambda n=n, m=m: found.update({n: m.read_all()}))
            for n, m in enumerate((one, two, one, two))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
    assert [found[n] == DISK for n in range(4)] == [True] * 4
    assert set(place.gate.ranges.values()) == {1}
    wait_until(lambda: cache.cached() == [digest])
    with cache.lease(digest, lazy=LazyStart(tmp_path / "s3", lambda _error: None)) as image:
        assert image.live is None


def test_wrong_bytes_reach_nobody(place: Place, digest: str, tmp_path: Path) -> None:
    cache = place.cache()
    with machine(cache, digest, tmp_path / "s") as got:
        good = got.read(0, 10)
        place.gate.spoil = lambda data: bytes([data[0] ^ 1]) + data[1:]
        with pytest.raises(OSError, match="is unavailable") as caught:
            got.read(SEGMENT_BYTES, 10)
        assert caught.value.errno == errno.EIO
        assert [type(error) for error in got.errors] == [DigestMismatch]
        assert good == DISK[:10]
    place.gate.spoil = lambda data: data
    assert place.plain().prepare(digest).root.read_bytes() == DISK


def test_a_read_waits_for_a_repository_that_comes_back(
    place: Place, digest: str, tmp_path: Path
) -> None:
    with machine(place.cache(), digest, tmp_path / "s") as got:
        place.gate.away = True
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(got.read(SEGMENT_BYTES, 10)))
        reader.start()
        wait_until(got.live.is_waiting)
        reader.join(2)
        assert reader.is_alive()
        place.gate.away = False
        reader.join(DEADLINE)
        assert found == [DISK[SEGMENT_BYTES : SEGMENT_BYTES + 10]]
        assert got.live.waited() > 1.5
        assert got.errors == []


def test_a_repository_that_stays_away(place: Place, digest: str, tmp_path: Path) -> None:
    place.retries = QUICK
    cache = place.cache(patience=1.0)
    with machine(cache, digest, tmp_path / "s") as got:
        got.read(0, 10)
        place.gate.away = True
        with pytest.raises(OSError, match="is unavailable"):
            got.read(SEGMENT_BYTES, 10)
        assert [type(error) for error in got.errors] == [Unavailable]
    with (
        pytest.raises(Unavailable),
        cache.lease(digest, lazy=LazyStart(tmp_path / "s2", lambda _error: None)),
    ):
        pass
    place.gate.away = False
    with machine(cache, digest, tmp_path / "s3") as got:
        assert got.read_all() == DISK


def test_an_ordinary_fetch_goes_on_where_it_was(place: Place, digest: str, tmp_path: Path) -> None:
    cache = place.cache()
    with machine(cache, digest, tmp_path / "s") as got:
        for at in range(0, 2 * SEGMENT_BYTES, CHUNK_BYTES):
            got.read(at, CHUNK_BYTES)
        got.read(2 * SEGMENT_BYTES, CHUNK_BYTES)
        cache.close()
    before = set(place.gate.ranges)
    place.gate.bytes = 0
    assert place.plain().prepare(digest).root.read_bytes() == DISK
    assert place.gate.bytes < 1.3 * (SEGMENT_BYTES + 6 * CHUNK_BYTES)
    assert len({segment for segment, _ in before}) == 4  # including the kernel's


def test_a_live_fetch_goes_on_where_another_was_killed(
    place: Place, digest: str, tmp_path: Path
) -> None:
    """The file holds garbage and half a segment, without a record of them."""
    content = ImageManifest.parse(place.fetcher().manifest(digest), digest).root.digest
    partial = place.root / "partial" / content.removeprefix("tree:")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(DISK[: SEGMENT_BYTES + CHUNK_BYTES] + noise(5 * SEGMENT_BYTES, "rubbish"))
    cache = place.cache()
    with machine(cache, digest, tmp_path / "s") as got:
        assert got.read_all() == DISK
    wait_until(lambda: cache.cached() == [digest])
    assert place.plain().prepare(digest).root.read_bytes() == DISK
    sent = sum(place.gate.ranges.values()) * WINDOW
    assert sent < 3 * SEGMENT_BYTES


def test_blocks_of_other_images_are_not_fetched_again(place: Place, tmp_path: Path) -> None:
    changed = bytearray(DISK)
    changed[9 * CHUNK_BYTES] ^= 1
    first, second = place.push(DISK), place.push(bytes(changed))
    place.plain().prepare(first)
    place.gate.bytes = 0
    with machine(place.cache(), second, tmp_path / "s") as got:
        assert got.read_all() == changed
    assert place.gate.bytes < 3 * CHUNK_BYTES


def test_who_reads_no_more_leaves_a_complete_image(place: Place, digest: str, tmp_path: Path) -> None:
    cache = place.cache()
    began = time.monotonic()
    with machine(cache, digest, tmp_path / "s") as got:
        got.read(0, 1)
    wait_until(lambda: cache.cached() == [digest])
    assert time.monotonic() - began < lazy_fetch.HOLD_SECONDS
    assert not (tmp_path / "s").exists()


def test_there_is_no_room(place: Place, tmp_path: Path) -> None:
    digest = place.push(noise(4 * SEGMENT_BYTES))
    cache = place.cache(limit=20 * MIB)
    with machine(cache, digest, tmp_path / "s") as got, pytest.raises(OSError, match="is unavailable"):
        got.read_all()
    assert [type(error) for error in got.errors] == [StorageFull]
    wait_until(lambda: not list((place.root / "partial").iterdir()))


def test_questions_that_make_no_sense(place: Place, digest: str, tmp_path: Path) -> None:
    cache = place.cache()
    with machine(cache, digest, tmp_path / "s") as got, socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(got.live.socket))
        _, (file,), *_ = socket.recv_fds(asking, nbd_plugin.HEADER.size, 1)
        os.close(file)
        for offset, length in ((len(DISK), 1), (0, len(DISK) + 1), (2**64 - 1, 4), (2**63, 2**31)):
            asking.sendall(nbd_plugin.REQUEST.pack(offset, length))
            assert asking.recv(1) == nbd_plugin.UNAVAILABLE
        assert got.errors == []
        assert got.read(0, 10) == DISK[:10]


def test_the_server_ends_with_whoever_fills_the_disk(place: Place, digest: str, tmp_path: Path) -> None:
    with place.cache().lease(digest, lazy=LazyStart(tmp_path / "s", lambda _error: None)) as image:
        assert image.live is not None
        name = f"vmjobs-{uuid.uuid4().hex}"
        process, _ = nbd_server.start(name, image.live, tmp_path)
    assert process.wait(DEADLINE) == -signal.SIGKILL
    assert nbd_server.find(name) == []


def test_a_server_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    name = f"vmjobs-{uuid.uuid4().hex}"
    with pytest.raises(HypervisorError, match="No such file"):
        nbd_server.start(name, LazyDisk(tmp_path / "nobody", MIB), tmp_path)
    assert nbd_server.find(name) == []


def test_what_a_node_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nbd_server.unavailable_reason() == ""
    poor = tmp_path / "nbdkit"
    poor.write_text("#!/bin/sh\necho no such plugin >&2\nexit 1\n")
    poor.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no such plugin" in nbd_server.unavailable_reason()
    poor.unlink()
    assert nbd_server.unavailable_reason() == "nbdkit is not installed"
