"""Limits of a node's image cache: eviction order, images in use, and killed processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from images.cache.node_cache import ImageCache
from images.content import SEGMENT_BYTES
from images.store.image_store import ImageStore
from tests.kit import KIT, ROOT
from tests.kit.image_cache import Remote, cut_off, files, put, used
from tests.kit.noise import noise
from tests.kit.waiting import wait_until
from vmjobs.errors import StorageFull
from vmjobs.model import MIB

#: Bytes of an image, without its kernel.
SIZE = 2 * MIB


def test_what_was_used_longest_ago_goes_first(node: Path, remote: Remote) -> None:
    images = [put(remote.store, noise(SIZE, n), b"kernel %d" % n)[0] for n in range(4)]
    cache = ImageCache(node, remote, limit=3 * SIZE + MIB)
    for digest in images[:3]:
        with cache.lease(digest):
            pass
    with cache.lease(images[0]):  # used again: now the second one is the oldest
        pass
    with cache.lease(images[3]):
        assert cache.cached() == sorted([images[0], images[2], images[3]])
    assert used(node) <= 3 * SIZE + MIB
    assert not any("partial" in name for name in files(node))
    assert node.stat().st_mode & 0o777 == 0o700


def test_the_end_of_a_use_counts_as_one_and_outlives_the_process(node: Path, remote: Remote) -> None:
    images = [put(remote.store, noise(SIZE, n), b"%d" % n)[0] for n in range(3)]
    cache = ImageCache(node, remote)
    with cache.lease(images[0]), cache.lease(images[1]):
        pass
    ImageCache(node, remote, limit=2 * SIZE + MIB).prepare(images[2])
    assert ImageCache(node, remote).cached() == sorted([images[0], images[2]])


def test_what_is_in_use_stays_and_what_does_not_fit_says_so(node: Path, remote: Remote) -> None:
    images = [put(remote.store, noise(SIZE, n), b"%d" % n)[0] for n in range(3)]
    cache = ImageCache(node, remote, limit=3 * MIB)
    with cache.lease(images[0]) as image:
        other = ImageCache(node, remote, limit=3 * MIB)  # as another process would
        with pytest.raises(StorageFull, match="images may take 3 MiB here"):
            other.prepare(images[1])
        assert image.root.read_bytes() == noise(SIZE, 0)
        assert cache.cached() == [images[0]]
        assert not any(name.startswith("partial") for name in files(node))
        assert len(list((node / "manifests").iterdir())) == 1
        assert len(list(ImageStore(node).folder.list())) == 2
    cache.prepare(images[1])
    assert cache.cached() == [images[1]]


def test_parts_that_an_image_in_use_needs_stay(node: Path, remote: Remote) -> None:
    """Two images share a kernel: evicting one image does not remove the other's kernel."""
    first, second = (put(remote.store, noise(SIZE, n))[0] for n in range(2))
    third, _ = put(remote.store, noise(SIZE, 3), b"another kernel")
    cache = ImageCache(node, remote, limit=2 * SIZE + MIB)
    cache.prepare(first)
    with cache.lease(second) as image:
        cache.prepare(third)
        assert cache.cached() == sorted([second, third])
        assert image.kernel is not None
        assert image.kernel.read_bytes() == b"kernel"


def test_leftovers_go_before_images(node: Path, remote: Remote) -> None:
    first, _ = put(remote.store, noise(2 * SEGMENT_BYTES, 0), b"0")
    given_up, _ = put(remote.store, noise(3 * SEGMENT_BYTES, 1), b"1")
    second, _ = put(remote.store, noise(2 * SEGMENT_BYTES, 2), b"2")
    cache = ImageCache(node, remote, limit=6 * SEGMENT_BYTES + MIB)
    cache.prepare(first)
    cut_off(remote, cache, given_up, after=2)
    ImageCache(node, remote, limit=4 * SEGMENT_BYTES + MIB).prepare(second)
    assert cache.cached() == sorted([first, second])
    assert not any(name.startswith("partial") for name in files(node))


def test_what_the_disk_must_keep_free_stays_free(node: Path, remote: Remote) -> None:
    digest, _ = put(remote.store)
    node.mkdir()
    disk = os.statvfs(node)
    free = disk.f_bavail * disk.f_frsize
    with pytest.raises(StorageFull, match="MiB are for jobs"):
        ImageCache(node, remote, keep_free=free + MIB).prepare(digest)
    assert files(node) == []


def user(
    node: Path, remote: Remote, limit: int, rounds: int, images: list[str]
) -> subprocess.Popen[str]:
    """Start a process that uses these images repeatedly."""
    arguments = [str(node), str(remote.store.root), str(limit), str(time.monotonic_ns()), str(rounds)]
    return subprocess.Popen(
        [sys.executable, str(KIT / "image_cache_child.py"), *arguments, *images],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
def test_processes_that_push_out_each_others_images(node: Path, remote: Remote) -> None:
    """Four processes, seven images, space for three: images in use are always complete."""
    images = [put(remote.store, noise(SEGMENT_BYTES, n), b"%d" % (n % 2))[0] for n in range(7)]
    limit = 3 * SEGMENT_BYTES + MIB
    users = [user(node, remote, limit, 25, images) for _ in range(4)]
    most = 0
    while any(process.poll() is None for process in users):
        most = max(most, used(node))
        time.sleep(0.05)
    done = [process.communicate()[0].split() for process in users]
    assert [process.returncode for process in users] == [0] * 4
    assert sum(int(count) for count, _ in done) > 25
    # Each of them may have reserved space for a segment at the same moment.
    assert most <= limit + 4 * SEGMENT_BYTES


@pytest.mark.slow
def test_processes_that_are_killed_leave_nothing_that_stays(node: Path, remote: Remote) -> None:
    """After kill -9 at any moment of fetching, evicting or using, the cache is consistent."""
    images = [put(remote.store, noise(SEGMENT_BYTES, n), b"%d" % (n % 2))[0] for n in range(7)]
    limit = 3 * SEGMENT_BYTES + MIB
    chance = random.Random(1)
    for _ in range(3):
        users = [user(node, remote, limit, 1000, images) for _ in range(4)]
        wait_until(lambda: list(node.glob("contents/*/*")), 30)
        time.sleep(0.7)  # let them start and get to any point
        for process in users:
            time.sleep(chance.random() / 4)
            process.kill()
            process.communicate()
            assert process.returncode == -signal.SIGKILL
    cache = ImageCache(node, remote, limit=limit)
    for number, digest in enumerate(images):
        with cache.lease(digest) as image:
            assert image.root.read_bytes() == noise(SEGMENT_BYTES, number)
    assert len(cache.cached()) == 3
    assert used(node) <= limit + MIB
    assert not list((node / "partial").iterdir())
    assert not list((node / "tmp").iterdir())
    assert {name.name for name in (node / "leases").iterdir()} == {d[7:] for d in cache.cached()}
