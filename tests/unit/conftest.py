"""Fixtures for unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from images.cache.node_cache import ImageCache
from images.store.image_store import ImageStore
from tests.kit.http_server import Scripted, scripted
from tests.kit.image_cache import Remote
from tests.kit.waiting import Clock
from vmjobs.cli.common import config


@pytest.fixture(autouse=True)
def _settings_of_this_test() -> Iterator[None]:
    """Clear the settings cache: commands read the settings once in a process."""
    config.cache_clear()
    yield
    config.cache_clear()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A path in the test's own directory at which nothing exists yet."""
    return tmp_path / "file"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    """A repository of images."""
    return Remote(ImageStore(tmp_path / "remote"))


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The directory of a node's image cache, not yet created."""
    return tmp_path / "node"


@pytest.fixture
def cache(node: Path, remote: Remote) -> ImageCache:
    return ImageCache(node, remote)


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as made:
        yield made
