"""Rules for unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_kit import Scripted, scripted

from vmjobs.cli.support import config


@pytest.fixture(autouse=True)
def _settings_of_this_test() -> Iterator[None]:
    """Commands read the settings once in a process."""
    config.cache_clear()
    yield
    config.cache_clear()


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as made:
        yield made
