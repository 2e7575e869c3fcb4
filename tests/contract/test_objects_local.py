"""Objects in a directory: full and broken disks, and foreign files."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from repository.storage.objects.base import CHUNK
from repository.storage.objects.local import LocalObjects
from tests.kit.full_disk import small_disk
from tests.kit.object_store import LARGE, Store, held
from vmjobs.errors import InvalidRequest, StorageFull, Unavailable


def test_a_full_disk_takes_nothing_half_and_goes_on_afterwards(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2) as disk:
        objects = LocalObjects(disk / "objects")
        objects.put_bytes("a", b"1" * CHUNK)
        for key in ("a", "b"):
            with pytest.raises(StorageFull):
                objects.put_bytes(key, bytes(8 * CHUNK))
        assert held(objects) == [("a", CHUNK)]
        objects.put_bytes("b", bytes(6 * CHUNK))  # no leftover takes its space
        assert objects.get("a") == b"1" * CHUNK


def test_a_file_from_another_disk_is_copied(tmp_path: Path) -> None:
    data = os.urandom(CHUNK + 1)
    (tmp_path / "file").write_bytes(data)
    with small_disk(tmp_path / "disk", 2) as disk:
        objects = LocalObjects(disk / "objects")
        objects.put_file("a", tmp_path / "file")
        assert objects.get("a") == data


def test_a_file_from_the_same_disk_is_moved(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"data")
    number = file.stat().st_ino
    LocalObjects(tmp_path / "objects").put_file("a/b", file)
    assert (tmp_path / "objects" / "a" / "b").stat().st_ino == number
    assert not file.exists()


def test_a_place_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "objects").write_text("not a directory")
    objects = LocalObjects(tmp_path / "objects")
    with pytest.raises(Unavailable) as told:
        objects.check()
    assert told.value.service == "storage"
    with pytest.raises(Unavailable):
        objects.put_bytes("a", b"x")


def test_an_object_that_is_in_the_way(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path / "objects")
    objects.put_bytes("a", b"x")
    with pytest.raises(Unavailable):
        objects.put_bytes("a/b", b"x")
    assert held(objects) == [("a", 1)]


def test_what_is_old_but_still_written_is_let_alone(tmp_path: Path) -> None:
    store = Store("", tmp_path)
    objects = store.open()
    with store.half_way("a/b"):
        (half,) = (tmp_path / "objects" / ".tmp").iterdir()
        os.utime(half, (0, 0))
        assert objects.clean() == 0
    os.utime(half, (0, 0))
    assert objects.clean() == 1
    assert not half.exists()


def test_a_young_file_may_still_get_its_lock(tmp_path: Path) -> None:
    temp = tmp_path / "objects" / ".tmp"
    temp.mkdir(parents=True)
    (temp / "new").write_bytes(b"")
    assert LocalObjects(tmp_path / "objects").clean() == 0


def test_a_refused_put_leaves_no_temporary_file(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path / "objects")
    with pytest.raises(InvalidRequest):
        objects.put("a", io.BytesIO(b"x"), LARGE)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
