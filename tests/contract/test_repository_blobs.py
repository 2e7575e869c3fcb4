"""Blobs appear whole or not at all, and are verified on every read."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from objects_kit import Store, held, small_disk

from repository.blobs import BlobStore
from repository.objects import ObjectStore
from repository.objects.base import CHUNK
from vmjobs.errors import (
    DigestMismatch,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    StorageFull,
    Unavailable,
)

pytestmark = pytest.mark.in_process

LIMIT = 16 * CHUNK


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A place for objects, with nothing in it."""
    url = "" if request.param == "local" else request.getfixturevalue("s3_url")
    return Store(url, tmp_path)


@pytest.fixture
def objects(place: Store) -> ObjectStore:
    """The objects at that place."""
    return place.open()


@pytest.fixture
def store(objects: ObjectStore, tmp_path: Path) -> BlobStore:
    """Blobs among them."""
    return BlobStore(objects, tmp_path / "spool")


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_in_and_out(store: BlobStore, size: int) -> None:
    data = os.urandom(size)
    info = store.put(io.BytesIO(data), limit=LIMIT)
    assert (info.digest, info.size, info.new) == (digest_of(data), size, True)
    assert not store.put(io.BytesIO(data), digest=info.digest, size=size, limit=LIMIT).new
    with store.open(info.digest) as reader:
        assert reader.size == size
        assert b"".join(reader) == data
    assert store.size(info.digest) == size


@pytest.mark.parametrize("damage", ["flip", "shorten", "lengthen"])
def test_a_corrupt_blob_is_named_and_never_read_to_its_end(
    store: BlobStore, objects: ObjectStore, damage: str
) -> None:
    data = bytes(3 * CHUNK)
    digest = store.put(io.BytesIO(data), limit=LIMIT).digest
    ((key, _),) = held(objects)
    damaged = {"flip": b"x" + data[1:], "shorten": data[:-1], "lengthen": data + b"x"}[damage]
    objects.put_bytes(key, damaged)
    got = b""
    with store.open(digest) as reader, pytest.raises(DigestMismatch, match=digest):
        for chunk in reader:
            got += chunk
    assert len(got) < reader.size
    store.put(io.BytesIO(data), digest=digest, limit=LIMIT)  # the same bytes again mend it
    with store.open(digest) as reader:
        assert reader.read_all() == data


def test_wrong_bytes_leave_nothing(store: BlobStore, objects: ObjectStore, tmp_path: Path) -> None:
    wrong = digest_of(b"other")
    with pytest.raises(DigestMismatch):
        store.put(io.BytesIO(b"data"), digest=wrong, limit=LIMIT)
    with pytest.raises(PayloadTooLarge):
        store.put(io.BytesIO(b"data"), limit=3)
    for size in (3, 5):
        with pytest.raises(InvalidRequest):
            store.put(io.BytesIO(b"data"), size=size, limit=LIMIT)
    assert not store.has(wrong)
    assert not store.has(digest_of(b"data"))
    assert held(objects) == []
    assert list((tmp_path / "spool").iterdir()) == []


@pytest.mark.parametrize("name", ["", "sha256:", "sha256:" + "g" * 64, "../x", "sha256:../../x"])
def test_names_that_are_no_digests(store: BlobStore, name: str) -> None:
    for ask in (store.has, store.open, store.size):
        with pytest.raises(InvalidRequest):
            ask(name)


def test_missing(store: BlobStore) -> None:
    digest = "sha256:" + "0" * 64
    with pytest.raises(NotFound, match=digest):
        store.open(digest)
    assert store.size(digest) is None


def test_a_spool_that_cannot_be_used(objects: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(Unavailable):
        BlobStore(objects, tmp_path / "file").put(io.BytesIO(b"x"), limit=LIMIT)


@pytest.mark.starts_processes
def test_a_full_spool(objects: ObjectStore, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        store = BlobStore(objects, disk / "spool")
        for _ in range(2):
            with pytest.raises(StorageFull):
                store.put(io.BytesIO(bytes(8 * CHUNK)), limit=LIMIT)
        store.put(io.BytesIO(bytes(3 * CHUNK)), limit=LIMIT)


WRITER = """
import sys
from pathlib import Path
from repository.blobs import BlobStore
from repository.objects import open_objects
from repository.objects.base import CHUNK
from vmjobs.config import Config

class Endless:
    count = 0
    def read(self, size):
        self.count += 1
        if self.count == 8:
            print("half way", flush=True)
        return bytes(CHUNK) if self.count < 16 else (sys.stdin.read() and b"")

objects = open_objects(Config(data_dir=Path(sys.argv[1]), storage_url=sys.argv[2]))
BlobStore(objects, Path(sys.argv[1]) / "spool").put(Endless(), limit=CHUNK * 1000)
"""


@pytest.mark.starts_processes
def test_a_killed_writer_leaves_no_blob(
    place: Store, store: BlobStore, objects: ObjectStore, tmp_path: Path
) -> None:
    digest = digest_of(bytes(15 * CHUNK))
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), place.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "half way\n"
    (half,) = (tmp_path / "spool").iterdir()
    os.utime(half, (0, 0))
    assert store.clean() == 0  # however old it looks: its writer lives
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert not store.has(digest)
    assert held(objects) == []
    os.utime(half, (0, 0))
    assert store.clean() == 1
    assert not half.exists()


def test_a_young_file_may_still_get_its_lock(store: BlobStore, tmp_path: Path) -> None:
    temp = tmp_path / "spool"
    temp.mkdir(parents=True)
    (temp / "new").write_bytes(b"")
    assert store.clean() == 0
