"""What every object store does, local or S3."""

from __future__ import annotations

import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from repository.storage.objects import ObjectStore
from repository.storage.objects.base import CHUNK, MAX_KEY
from repository.storage.objects.s3 import PART_BYTES
from tests.kit.object_store import LARGE, Store, held
from tests.kit.repository_jobs import refused
from vmjobs.errors import InvalidRequest, NotFound, Unavailable

BAD_KEYS = [
    *("", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/../../b", "a/./b", ".tmp/x", "a/.b"),
    *("-a", "A", "a b", "a\n", "a\0b", "a\\b", "a%2fb", "ä", "a?b", "a" * (MAX_KEY + 1)),
]


@pytest.mark.parametrize(
    "size", [0, 1, CHUNK - 1, CHUNK + 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 3]
)
def test_in_and_out(object_store: Store, objects: ObjectStore, size: int) -> None:
    data = os.urandom(size)
    objects.put("a/b/c", io.BytesIO(data), size)
    other = object_store.open()
    assert other.size("a/b/c") == size
    with other.open("a/b/c") as reader:
        assert reader.size == size
        assert reader.read() == data
        assert (reader.read(), reader.read(1)) == (b"", b"")
        if reader.file is not None:
            assert os.pread(reader.file.fileno(), len(data) + 1, 0) == data


def test_a_new_put_replaces_the_old_one(objects: ObjectStore) -> None:
    objects.put_bytes("a", b"one")
    objects.put_bytes("a", b"three")
    assert objects.get("a") == b"three"
    assert held(objects) == [("a", 5)]


def test_reading_from_anywhere(objects: ObjectStore) -> None:
    data = os.urandom(3 * CHUNK)
    objects.put_bytes("a", data)
    with objects.open("a") as reader:
        for offset, length in [(5, 7), (0, 1), (CHUNK, 2 * CHUNK), (3 * CHUNK - 1, 99), (3 * CHUNK, 1)]:
            reader.seek(offset)
            assert reader.read(length) == data[offset : offset + length]
        reader.seek(1)
        assert reader.read(2) + reader.read(3) + reader.read() == data[1:]


def test_a_reader_never_mixes_two_objects(objects: ObjectStore) -> None:
    size = 8 * CHUNK
    objects.put_bytes("a", b"1" * size)
    with objects.open("a") as reader:
        head = reader.read(10)
        objects.put_bytes("a", b"2" * size)
        try:
            reader.seek(CHUNK)
            rest = reader.read()
        except Unavailable:
            rest = b""
    assert set(head + rest) == set(b"1")


def test_a_file_goes_in_whole(objects: ObjectStore, tmp_path: Path) -> None:
    data = os.urandom(CHUNK + 1)
    for name in ("made", "again"):
        path = tmp_path / name
        path.write_bytes(data)
        objects.put_file("folder/a", path)
    assert objects.get("folder/a") == data


def test_what_is_not_there(objects: ObjectStore) -> None:
    objects.put_bytes("a/b", b"x")
    for key in ("a", "b", "a/c", "c/d"):
        refused(NotFound, lambda key=key: objects.open(key))
        assert objects.size(key) is None
        objects.delete(key)
    for _ in range(2):
        objects.delete("a/b")
        assert objects.size("a/b") is None
    assert held(objects) == []


def test_keys_of_a_folder_in_order(objects: ObjectStore) -> None:
    keys = ["a/b-c", "a/b.c", "a/b/c", "a/b/d", "a/b0", "a0/x", "aa", "b/c/d/e"]
    before = datetime.now(UTC) - timedelta(seconds=2)
    for key in reversed(keys):
        objects.put_bytes(key, key.encode())
    assert held(objects) == [(key, len(key)) for key in keys]
    found = list(objects.keys("a"))
    assert all(before < o.modified < datetime.now(UTC) + timedelta(seconds=2) for o in found)
    assert [o.key for o in found] == keys[:5]
    assert [o.key for o in objects.keys("a/b/")] == ["a/b/c", "a/b/d"]
    assert list(objects.keys("none")) == list(objects.keys("aa")) == []


@pytest.mark.parametrize("announced", [0, 99, 101, PART_BYTES + 1])
def test_a_wrong_size_leaves_what_was_there(objects: ObjectStore, announced: int) -> None:
    objects.put_bytes("a", b"old")
    for key in "ab":
        with pytest.raises(InvalidRequest, match=str(announced)):
            objects.put(key, io.BytesIO(bytes(100)), announced)
    assert objects.get("a") == b"old"
    assert held(objects) == [("a", 3)]


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have unfinished writes count as abandoned at once."""
    monkeypatch.setattr("repository.storage.spool.SETTLE_SECONDS", -1.0)
    monkeypatch.setattr("repository.storage.objects.s3.STALE_AFTER", timedelta(seconds=-60))


class Breaking(io.BytesIO):
    """A source whose sender disconnects."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Raises instead of reporting the end."""
        return super().read(size) or self._break()

    def _break(self) -> bytes:
        raise ZeroDivisionError


@pytest.mark.parametrize("size", [100, LARGE])
def test_a_source_that_breaks_off_leaves_nothing(
    object_store: Store, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    with pytest.raises(ZeroDivisionError):
        objects.put("a", Breaking(bytes(size - 1)), size)
    assert objects.size("a") is None
    assert held(object_store.open()) == []
    impatient(monkeypatch)
    assert objects.clean() == 0


def test_no_other_keys(objects: ObjectStore, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    for key in BAD_KEYS:
        for ask in (objects.open, objects.size, objects.delete, objects.get):
            refused(InvalidRequest, lambda ask=ask, key=key: ask(key))
        refused(
            InvalidRequest,
            lambda key=key: objects.put_bytes(key, b"x"),
            lambda key=key: objects.put_file(key, file),
        )
        if key.removesuffix("/") not in ("", "a"):
            refused(InvalidRequest, lambda key=key: list(objects.keys(key)))
    assert file.exists()


def test_puts_of_one_key_at_once(object_store: Store) -> None:
    size, rounds = 2 * CHUNK + 1, 5
    stop = threading.Event()
    seen: set[bytes] = set()

    def write(digit: int) -> None:
        objects = object_store.open()
        for _ in range(rounds):
            objects.put_bytes("a/b", bytes([digit]) * size)

    def read() -> None:
        objects = object_store.open()
        while not stop.is_set():
            seen.add(objects.get("a/b"))

    object_store.open().put_bytes("a/b", bytes([0]) * size)
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(read)
        for writing in [pool.submit(write, digit) for digit in range(4)]:
            writing.result()
        stop.set()
        reading.result()
    assert seen
    assert all(len(data) == size and len(set(data)) == 1 for data in seen)


def test_a_killed_writer_leaves_no_object(
    object_store: Store, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects.put_bytes("a/old", b"old")
    with object_store.half_way("a/b"), object_store.half_way("a/old"):
        assert objects.size("a/b") is None
        assert objects.clean() == 0
    assert held(objects) == [("a/old", 3)]
    assert objects.clean() == 0  # too recent to count as abandoned
    impatient(monkeypatch)
    assert objects.clean() == 2
    assert objects.clean() == 0
    assert objects.get("a/old") == b"old"


def test_a_store_that_works_says_so(objects: ObjectStore) -> None:
    objects.check()
    assert held(objects) == []
