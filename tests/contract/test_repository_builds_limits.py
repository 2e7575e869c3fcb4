"""Limits of one owner's builds: how many there may be, and what listing them reads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from images.store.image_store import ImageStore
from repository.builds import build_worker
from repository.builds.requests import MAX_ACTIVE
from repository.service import Repository
from tests.kit.builds import ADA, create, wish
from tests.kit.repository_jobs import statements
from vmjobs.errors import Conflict

pytestmark = pytest.mark.in_process


def create_twice(repository: Repository, key: str = "") -> list[str | Conflict]:
    """Create a build, and another one while that is published; return their ids or errors."""
    done: list[str | Conflict] = []

    def other() -> None:
        try:
            done.append(repository.builds.create(ADA, wish(), key=key).id)
        except Conflict as error:
            done.append(error)

    second = threading.Thread(target=other)

    def publish(_build: str) -> None:
        second.start()
        second.join(1)  # without the lock, it would count now

    first = repository.builds.create(ADA, wish(), key=key, publish=publish).id
    second.join(120)
    assert not second.is_alive()
    return [first, *done]


@pytest.mark.both_databases
def test_two_at_the_same_moment_are_not_one_too_many(repository: Repository) -> None:
    for _ in range(MAX_ACTIVE - 1):
        create(repository)
    _, second = create_twice(repository)
    assert isinstance(second, Conflict)
    assert len(repository.builds.list("ada")) == MAX_ACTIVE


@pytest.mark.both_databases
def test_the_same_key_at_the_same_moment(repository: Repository) -> None:
    first, second = create_twice(repository, key="k")
    assert first == second


def test_a_list_does_not_read_what_was_asked_for(repository: Repository) -> None:
    made = create(repository)
    with statements(repository.database) as said:
        assert repository.builds.list("ada") == [made]
    assert any("FROM builds" in statement for statement, _ in said)
    assert not any("builds.request" in statement for statement, _ in said)


def test_a_list_has_bounds(repository: Repository) -> None:
    create(repository)
    create(repository)
    for limit in (0, -1, 10**6):
        assert 1 <= len(repository.builds.list("ada", limit)) <= 2


@pytest.mark.parametrize("room", [0, 1 << 62])
def test_downloads_go_where_room_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(build_worker, "MIN_FREE_BYTES", room)
    files = [tmp_path / "packages" / "bookworm-1.tar", tmp_path / "wheels" / "x-1-py3-none-any.whl"]
    for file in files:
        file.parent.mkdir()
        file.write_bytes(b"x")
    build_worker._clean(tmp_path, ImageStore(tmp_path / "images"))
    assert [file.exists() for file in files] == [not room] * 2
