"""The node's image cache: fetches each image once, checks, resumes, requires trust."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from images.cache.node_cache import ImageCache
from images.content import CHUNK_BYTES, SEGMENT_BYTES
from images.signature import require_signed, sign
from tests.kit.image_cache import DISK, Remote, cut_off, damage, files, put, used
from tests.kit.noise import noise
from tests.kit.segments import encode_segment
from vmjobs.errors import DigestMismatch, ImageRejected, NotFound


@pytest.fixture
def digest(remote: Remote) -> str:
    """Return the digest of an image that the repository has."""
    return put(remote.store)[0]


def test_an_image_is_fetched_once_and_kept_sparse(
    cache: ImageCache, node: Path, remote: Remote
) -> None:
    digest, manifest = put(remote.store)
    seen: list[tuple[int, int]] = []
    image = cache.prepare(digest, lambda done, total: seen.append((done, total)))
    assert image.root.read_bytes() == DISK
    assert image.kernel is not None
    assert image.kernel.read_bytes() == b"kernel"
    assert image.root.stat().st_blocks * 512 < SEGMENT_BYTES + 4 * CHUNK_BYTES
    done = [done for done, _ in seen]
    assert done == sorted(done)
    assert seen[-1] == (manifest.size, manifest.size)
    assert done[0] < manifest.size
    assert ImageCache(node, remote).prepare(digest) == image
    assert len(remote.segments) == 4  # not the one that is all zeros
    assert cache.cached() == [digest]
    assert list((node / "partial").iterdir()) == list((node / "tmp").iterdir()) == []


def test_it_says_how_often_an_image_was_here_and_what_all_take(
    digest: str, cache: ImageCache, node: Path, remote: Remote
) -> None:
    assert (cache.hits, cache.misses, cache.used()) == (0, 0, 0)
    for _ in range(3):
        with cache.lease(digest):
            pass
    assert (cache.hits, cache.misses) == (2, 1)
    assert cache.used() == used(node / "contents") > len(DISK) // 4
    with pytest.raises(NotFound), cache.lease("sha256:" + "0" * 64):
        pass
    assert (cache.hits, cache.misses) == (2, 2)


def test_it_says_how_much_of_an_image_came_from_elsewhere(
    digest: str, cache: ImageCache, remote: Remote
) -> None:
    assert cache.fetched(digest) == 0
    cache.prepare(digest)
    assert cache.fetched(digest) == remote.bytes > 0
    cache.prepare(digest)
    assert cache.fetched(digest) == remote.bytes, "it was all here"
    assert cache.fetched("sha256:" + "0" * 64) == 0


def test_many_at_once_fetch_once(digest: str, node: Path, remote: Remote) -> None:
    start = threading.Barrier(8)

    def job(_number: int) -> bool:
        start.wait(10)
        return ImageCache(node, remote).prepare(digest).root.read_bytes() == DISK

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(job, range(8), timeout=30)) == [True] * 8
    assert len(remote.segments) == 4


def test_who_waits_for_another_ones_fetch_can_still_be_stopped(
    digest: str, node: Path, remote: Remote
) -> None:
    under_way, go_on = threading.Event(), threading.Event()

    def before(_count: int) -> None:
        under_way.set()
        assert go_on.wait(30)

    remote.before = before
    thread = threading.Thread(target=ImageCache(node, remote).prepare, args=(digest,))
    thread.start()
    assert under_way.wait(10)

    def stop(_done: int, _total: int) -> None:
        raise InterruptedError("not wanted any more")

    with pytest.raises(InterruptedError):
        ImageCache(node, remote).prepare(digest, stop)
    go_on.set()
    thread.join(30)
    assert ImageCache(node, remote).prepare(digest).root.read_bytes() == DISK


def test_a_fetch_can_be_stopped_while_nothing_comes(digest: str, node: Path, remote: Remote) -> None:
    go_on = threading.Event()
    remote.before = lambda _count: go_on.wait(30) and None
    calls = 0

    def stop_soon(_done: int, _total: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise InterruptedError("not wanted any more")

    began = time.monotonic()
    with pytest.raises(InterruptedError):
        ImageCache(node, remote).prepare(digest, stop_soon)
    assert time.monotonic() - began < 15
    go_on.set()


def test_images_share_what_they_have_in_common(cache: ImageCache, node: Path, remote: Remote) -> None:
    """Segments that any other image of this node has are not fetched; order does not matter."""
    pieces = [noise(SEGMENT_BYTES, n) for n in range(6)]
    first, _ = put(remote.store, b"".join(pieces[:4]))
    second, manifest = put(remote.store, b"".join([pieces[3], pieces[5], pieces[0], pieces[0]]))
    cache.prepare(first)
    remote.segments.clear()
    image = cache.prepare(second)
    assert image.root.read_bytes() == pieces[3] + pieces[5] + pieces[0] + pieces[0]
    assert remote.segments == [remote.store.folder.layout(manifest.root.digest).segments[1]]


def test_a_segment_that_occurs_twice_is_fetched_once(node: Path, remote: Remote) -> None:
    piece = noise(SEGMENT_BYTES)
    digest, _ = put(remote.store, piece * 3)
    assert ImageCache(node, remote).prepare(digest).root.read_bytes() == piece * 3
    assert len(remote.segments) == 2


def test_what_another_image_has_damaged_is_fetched(cache: ImageCache, remote: Remote) -> None:
    disk = noise(2 * SEGMENT_BYTES)
    first, _ = put(remote.store, disk)
    second, _ = put(remote.store, disk + b"more")
    damage(cache.prepare(first).root)
    remote.bytes = 0
    assert cache.prepare(second).root.read_bytes() == disk + b"more"
    assert CHUNK_BYTES < remote.bytes < 3 * CHUNK_BYTES  # the damaged chunk and the new one
    remote.bytes = 0
    assert cache.prepare(first).root.read_bytes() == disk
    assert remote.bytes == 0


def test_of_a_changed_image_only_the_changed_blocks_are_fetched(
    cache: ImageCache, remote: Remote
) -> None:
    """Also if no segment is the same, and if the chunks moved."""
    old = noise(6 * SEGMENT_BYTES)
    new = bytearray(old[20 * CHUNK_BYTES :] + old[: 20 * CHUNK_BYTES])
    for segment in range(6):
        new[segment * SEGMENT_BYTES + 5 * CHUNK_BYTES] ^= 1
    new[3 * SEGMENT_BYTES : 3 * SEGMENT_BYTES + 10 * CHUNK_BYTES] = bytes(10 * CHUNK_BYTES)
    first, _ = put(remote.store, old)
    second, _ = put(remote.store, bytes(new))
    cache.prepare(first)
    remote.bytes = remote.requests = 0
    assert cache.prepare(second).root.read_bytes() == new
    assert remote.bytes < 2 * 6 * CHUNK_BYTES
    assert remote.requests == 6 + 5  # a head of each segment, and each changed chunk


def test_a_block_that_is_damaged_here_is_fetched(cache: ImageCache, remote: Remote) -> None:
    old = noise(2 * SEGMENT_BYTES)
    new = old[:-1] + b"!"
    first, _ = put(remote.store, old)
    second, _ = put(remote.store, new)
    damage(cache.prepare(first).root, SEGMENT_BYTES + 7 * CHUNK_BYTES)
    damage(cache.prepare(first).root, SEGMENT_BYTES + 7 * CHUNK_BYTES)  # repaired, and damaged again
    remote.bytes = 0
    assert cache.prepare(second).root.read_bytes() == new
    assert remote.bytes < 4 * CHUNK_BYTES


@pytest.mark.slow
def test_images_with_nothing_in_common_are_not_asked_about_for_long(
    cache: ImageCache, remote: Remote
) -> None:
    first, _ = put(remote.store, noise(SEGMENT_BYTES))
    second, _ = put(remote.store, noise(20 * SEGMENT_BYTES, 1))
    cache.prepare(first)
    remote.requests = 0
    cache.prepare(second)
    assert 20 < remote.requests <= 20 + 4 + 4  # concurrent fetches ask as well


def test_a_fetch_that_is_cut_off_goes_on_where_it_was(
    cache: ImageCache, node: Path, remote: Remote
) -> None:
    disk = noise(12 * SEGMENT_BYTES)
    digest, _ = put(remote.store, disk)
    cut_off(remote, cache, digest, after=7)
    assert cache.cached() == []
    assert used(node / "partial") // SEGMENT_BYTES == 7
    assert cache.prepare(digest).root.read_bytes() == disk
    assert len(remote.segments) == 12 - 7 + 1  # and the kernel
    assert list((node / "partial").iterdir()) == []


def test_what_was_fetched_before_a_crash_is_checked(node: Path, remote: Remote) -> None:
    """Without the note of an orderly end, the file is read and its wrong parts are replaced."""
    data = [noise(SEGMENT_BYTES, n) for n in range(3)]
    disk = b"".join([*data, bytes(SEGMENT_BYTES), bytes(CHUNK_BYTES), noise(CHUNK_BYTES, 9)])
    digest, manifest = put(remote.store, disk)
    partial = node / "partial" / manifest.root.digest.removeprefix("tree:")
    partial.parent.mkdir(parents=True)
    # One good segment, one half written, one not begun; garbage where zeros should be.
    half = data[1][: 3 * CHUNK_BYTES]
    garbage = noise(SEGMENT_BYTES, 7) + b"\1" * CHUNK_BYTES
    partial.write_bytes(data[0] + half + bytes(2 * SEGMENT_BYTES - len(half)) + garbage)
    assert ImageCache(node, remote).prepare(digest).root.read_bytes() == disk
    assert len(remote.segments) == 4  # two of data, the last one, the kernel


def test_what_is_wrong_in_a_file_is_not_forgotten_by_the_next_attempt(
    cache: ImageCache, node: Path, remote: Remote
) -> None:
    """An attempt finds garbage where zeros belong, and is itself cut off."""
    disk = noise(2 * SEGMENT_BYTES) + bytes(CHUNK_BYTES) + noise(CHUNK_BYTES, 9) + bytes(SEGMENT_BYTES)
    digest, manifest = put(remote.store, disk)
    partial = node / "partial" / manifest.root.digest.removeprefix("tree:")
    partial.parent.mkdir(parents=True)
    with partial.open("wb") as file:
        file.seek(2 * SEGMENT_BYTES)
        file.write(noise(3 * CHUNK_BYTES, 5))
        file.seek(3 * SEGMENT_BYTES)
        file.write(noise(CHUNK_BYTES, 6))
    cut_off(remote, cache, digest, after=1)
    assert list(node.glob("partial/*.note"))
    assert cache.prepare(digest).root.read_bytes() == disk


def test_a_note_that_does_not_fit_its_file_is_not_believed(
    cache: ImageCache, node: Path, remote: Remote
) -> None:
    disk = noise(4 * SEGMENT_BYTES)
    digest, manifest = put(remote.store, disk)

    cut_off(remote, cache, digest, after=3)
    damage(node / "partial" / manifest.root.digest.removeprefix("tree:"))
    assert cache.prepare(digest).root.read_bytes() == disk


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"!",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda _data: b"",
        lambda _data: b"<html>captive portal</html>",
        lambda _data: encode_segment(noise(SEGMENT_BYTES, "another one")),
    ],
)
def test_other_bytes_than_asked_for_are_never_kept(
    digest: str, cache: ImageCache, remote: Remote, change: object
) -> None:
    remote.change = change  # type: ignore[assignment]
    with pytest.raises(DigestMismatch):
        cache.prepare(digest)
    assert cache.cached() == []
    remote.change = lambda data: data
    assert cache.prepare(digest).root.read_bytes() == DISK


def test_a_layout_that_does_not_fit_the_manifest_is_refused(
    digest: str, node: Path, remote: Remote
) -> None:
    whole = remote.layout
    remote.layout = lambda image, content: whole(image, content)[:-32]  # type: ignore[method-assign]
    with pytest.raises(DigestMismatch, match="layout"):
        ImageCache(node, remote).prepare(digest)


def test_a_cached_image_that_is_damaged_is_mended(cache: ImageCache, remote: Remote) -> None:
    disk = noise(3 * SEGMENT_BYTES)
    digest, _ = put(remote.store, disk)
    damage(cache.prepare(digest).root)
    remote.bytes = 0
    assert cache.prepare(digest).root.read_bytes() == disk
    assert CHUNK_BYTES < remote.bytes < 2 * CHUNK_BYTES  # only what is damaged
    os.truncate(cache.prepare(digest).root, 2 * SEGMENT_BYTES - 5)
    remote.bytes = 0
    assert cache.prepare(digest).root.read_bytes() == disk
    assert SEGMENT_BYTES < remote.bytes < SEGMENT_BYTES + 3 * CHUNK_BYTES


def test_an_image_that_nobody_has_is_not_found_and_leaves_nothing(node: Path, remote: Remote) -> None:
    for digest in ("sha256:" + "0" * 64, "sha256:../../x", "", "tree:" + "0" * 64):
        with pytest.raises(NotFound):
            ImageCache(node, remote).prepare(digest)
    assert files(node) == []


def test_an_image_that_nobody_signed_is_refused_also_when_it_is_here(
    digest: str, node: Path, remote: Remote
) -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    keys = {"site": key.public_key()}
    ImageCache(node, remote).prepare(digest)
    cache = ImageCache(node, remote, trust=lambda d, s: require_signed(d, s, keys))
    with pytest.raises(ImageRejected, match="has no signature"):
        cache.prepare(digest)
    remote.signatures[digest] = sign(digest, other)
    with pytest.raises(ImageRejected, match="by none of them"), cache.lease(digest):
        pass
    remote.signatures[digest] += f" {sign(digest, key)}"
    asked = remote.asked
    for _ in range(3):
        assert cache.prepare(digest).root.read_bytes() == DISK
    assert remote.asked == asked + 1  # the signature is kept with the image
    keys.clear()  # no longer trusted
    with pytest.raises(ImageRejected):
        cache.prepare(digest)


def test_nothing_is_fetched_of_an_image_that_nobody_signed(
    digest: str, node: Path, remote: Remote
) -> None:
    cache = ImageCache(node, remote, trust=lambda d, s: require_signed(d, s, {}))
    with pytest.raises(ImageRejected):
        cache.prepare(digest)
    assert remote.segments == []
    assert files(node) == []
