"""Images that the repository requests for a node: background fetch, announcement."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from images.cache.node_cache import ImageCache
from images.content import SEGMENT_BYTES
from tests.kit.image_cache import Remote, put
from tests.kit.noise import noise
from vmjobs.agent.node import NodeAnnouncer, describe
from vmjobs.agent.prefetch import FIRST_PAUSE_SECONDS, Prefetcher
from vmjobs.config import Config
from vmjobs.errors import Unavailable
from vmjobs.model import MIB, Node
from vmjobs.wire import NodeWishes


def run_dry(prefetcher: Prefetcher) -> list[str]:
    """Step until nothing is due; return one entry for each fetched image."""
    came: list[str] = []
    while prefetcher.step(1e12, lambda: came.append("an image")) == 0:
        pass
    return came


@pytest.fixture
def prefetcher(cache: ImageCache) -> Prefetcher:
    return Prefetcher(cache)


def test_what_is_wished_for_is_fetched_once_and_told(
    remote: Remote, cache: ImageCache, prefetcher: Prefetcher
) -> None:
    images = [put(remote.store, noise(SEGMENT_BYTES, n))[0] for n in range(3)]
    cache.prepare(images[1])
    assert prefetcher.step(0.0, lambda: None) is None
    prefetcher.set_wanted(NodeWishes(prefetch=tuple(images)))
    assert len(run_dry(prefetcher)) == 2
    assert cache.cached() == sorted(images)
    count = len(remote.segments)
    prefetcher.set_wanted(NodeWishes(prefetch=tuple(images)))
    assert run_dry(prefetcher) == []
    assert len(remote.segments) == count


def test_what_cannot_be_had_is_tried_again_later_and_holds_up_nothing(
    remote: Remote, cache: ImageCache, prefetcher: Prefetcher
) -> None:
    good, _ = put(remote.store, noise(SEGMENT_BYTES))
    nowhere = "sha256:" + "0" * 64
    prefetcher.set_wanted(NodeWishes(prefetch=(nowhere, good)))
    came: list[str] = []
    for _ in range(2):
        assert prefetcher.step(0.0, lambda: came.append("an image")) == 0
    assert cache.cached() == [good]
    assert came == ["an image"]
    wait = prefetcher.step(0.0, lambda: None)
    assert wait is not None
    assert wait > FIRST_PAUSE_SECONDS / 2
    prefetcher.set_wanted(NodeWishes())
    assert prefetcher.step(0.0, lambda: None) is None


def test_it_never_pushes_out_what_is_in_use(tmp_path: Path, remote: Remote) -> None:
    used, _ = put(remote.store, noise(2 * SEGMENT_BYTES, 0), b"0")
    idle, _ = put(remote.store, noise(2 * SEGMENT_BYTES, 1), b"1")
    wished, _ = put(remote.store, noise(4 * SEGMENT_BYTES, 2), b"2")
    cache = ImageCache(tmp_path / "node", remote, limit=5 * SEGMENT_BYTES)
    cache.prepare(idle)
    with cache.lease(used) as image:
        prefetcher = Prefetcher(cache)
        prefetcher.set_wanted(NodeWishes(prefetch=(wished,)))
        assert prefetcher.step(0.0, lambda: None) == 0
        assert cache.cached() == [used]
        assert image.root.read_bytes() == noise(2 * SEGMENT_BYTES, 0)


def test_an_agent_that_ends_does_not_wait_for_a_fetch(remote: Remote, prefetcher: Prefetcher) -> None:
    digest, _ = put(remote.store, noise(6 * SEGMENT_BYTES))
    under_way, go_on = threading.Event(), threading.Event()

    def before(count: int) -> None:
        if count:
            under_way.set()
            assert go_on.wait(30)

    remote.before = before
    prefetcher.set_wanted(NodeWishes(prefetch=(digest,)))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(prefetcher.run, lambda: None)
        assert under_way.wait(30)
        prefetcher.stop()
        assert running.exception(30) is None
        go_on.set()


class Registry:
    """Records announcements, and requests images. broken: it does not answer."""

    def __init__(self, wishes: NodeWishes) -> None:
        self.nodes: list[Node] = []
        self.wishes = wishes
        self.broken = False
        self.changed = threading.Condition()

    def put_node(self, node: Node) -> NodeWishes:
        with self.changed:
            self.nodes.append(node)
            self.changed.notify_all()
        if self.broken:
            raise Unavailable("api", "nobody is there")
        return self.wishes


def test_a_prefetched_image_is_announced_at_once(
    tmp_path: Path, remote: Remote, cache: ImageCache, prefetcher: Prefetcher
) -> None:
    digest, _ = put(remote.store, noise(SEGMENT_BYTES))
    registry = Registry(NodeWishes(prefetch=(digest,)))
    settings = Config(state_dir=tmp_path, site="here", image_cache_size=1024 * MIB)
    announcer = NodeAnnouncer(
        registry.put_node,
        lambda: describe("n", settings, (), cache.cached(), ()),
        prefetcher.set_wanted,
    )
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(announcer.run), pool.submit(prefetcher.run, announcer.wake)]
        with registry.changed:
            # Far sooner than the next regular announcement would be.
            assert registry.changed.wait_for(lambda: any(n.images for n in registry.nodes), 10)
        announcer.stop()
        prefetcher.stop()
        assert [one.exception(10) for one in running] == [None, None]
    assert registry.nodes[0].site == "here"
    assert registry.nodes[-1].images == (digest,)
    assert registry.nodes[0].updated <= datetime.now(UTC)


def test_an_api_that_does_not_answer_stops_nothing(tmp_path: Path) -> None:
    registry = Registry(NodeWishes())
    registry.broken = True
    settings = Config(state_dir=tmp_path)
    granted: list[NodeWishes] = []
    announcer = NodeAnnouncer(
        registry.put_node, lambda: describe("n", settings, (), [], ()), granted.append
    )
    announcer.step()
    assert (len(registry.nodes), granted) == (1, [])
    registry.broken = False
    announcer.step()
    assert granted == [NodeWishes()]


def test_disks_of_vms_do_not_lessen_twice_what_a_node_offers_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Config(state_dir=tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000 * MIB))

    def offered(settings: Config) -> int:
        return describe("n", settings, (), [], ()).cluster_disk

    assert offered(settings) == 500
    disk = tmp_path / "members" / "a" / "machine" / "scratch.disk"
    disk.parent.mkdir(parents=True)
    with disk.open("wb") as file:
        file.write(b"x" * 64 * MIB)
        os.fsync(file.fileno())
        file.truncate(1024 * MIB)  # unwritten bytes take no space
    assert 532 <= offered(settings) < 540
    assert offered(settings.model_copy(update={"cluster_disk": 7})) == 7
