"""Rules for unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_kit import typed
from http_kit import Scripted, scripted
from images_cache_kit import Remote
from waiting_kit import Clock

from images.cache.node_cache import ImageCache
from images.store.image_store import ImageStore
from vmjobs.cli.common import config

__all__ = ["typed"]


@pytest.fixture(autouse=True)
def _settings_of_this_test() -> Iterator[None]:
    """Commands read the settings once in a process."""
    config.cache_clear()
    yield
    config.cache_clear()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where there is nothing yet, in a directory of the test's own."""
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
    """Where a node's cache of images is to be."""
    return tmp_path / "node"


@pytest.fixture
def cache(node: Path, remote: Remote) -> ImageCache:
    return ImageCache(node, remote)


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as made:
        yield made
