"""Blobs appear whole or not at all, and are verified on every read."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from repository.storage.blobs import BlobStore
from repository.storage.objects import ObjectStore
from repository.storage.objects.base import CHUNK
from tests.kit.full_disk import small_disk
from tests.kit.object_store import Store, held
from tests.kit.repository_jobs import digest_of, refused
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
#: For tests in which the kind of object store makes no difference.
LOCAL = pytest.mark.parametrize("object_store", ["local"], indirect=True)


@pytest.fixture
def store(objects: ObjectStore, tmp_path: Path) -> BlobStore:
    """A blob store that uses these objects."""
    return BlobStore(objects, tmp_path / "spool")


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_in_and_out(store: BlobStore, size: int) -> None:
    data = os.urandom(size)
    info = store.put(io.BytesIO(data), limit=LIMIT)
    assert (info.digest, info.size) == (digest_of(data), size)
    assert store.put(io.BytesIO(data), digest=info.digest, size=size, limit=LIMIT) == info
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
    store.put(io.BytesIO(data), digest=digest, limit=LIMIT)  # uploading the same bytes again repairs it
    with store.open(digest) as reader:
        assert b"".join(reader) == data


@LOCAL
def test_wrong_bytes_leave_nothing(store: BlobStore, objects: ObjectStore, tmp_path: Path) -> None:
    wrong = digest_of(b"other")

    def put(**more: Any) -> None:
        store.put(io.BytesIO(b"data"), **{"limit": LIMIT, **more})

    refused(DigestMismatch, lambda: put(digest=wrong))
    refused(PayloadTooLarge, lambda: put(limit=3))
    refused(InvalidRequest, lambda: put(size=3), lambda: put(size=5))
    assert store.size(wrong) is None
    assert store.size(digest_of(b"data")) is None
    assert held(objects) == []
    assert list((tmp_path / "spool").iterdir()) == []


@LOCAL
def test_names_of_no_blob(store: BlobStore) -> None:
    for name in ("", "sha256:", "sha256:" + "g" * 64, "../x", "sha256:../../x"):
        for ask in (store.open, store.size):
            refused(InvalidRequest, lambda ask=ask, name=name: ask(name))
    digest = "sha256:" + "0" * 64
    refused(NotFound, lambda: store.open(digest), match=digest)
    assert store.size(digest) is None


@LOCAL
def test_a_spool_that_cannot_be_used(objects: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    store = BlobStore(objects, tmp_path / "file")
    refused(Unavailable, lambda: store.put(io.BytesIO(b"x"), limit=LIMIT))


@LOCAL
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
from repository.storage.blobs import BlobStore
from repository.storage.objects import open_objects
from repository.storage.objects.base import CHUNK
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


@LOCAL
@pytest.mark.starts_processes
def test_a_killed_writer_leaves_no_blob(
    object_store: Store, store: BlobStore, objects: ObjectStore, tmp_path: Path
) -> None:
    digest = digest_of(bytes(15 * CHUNK))
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), object_store.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "half way\n"
    (half,) = (tmp_path / "spool").iterdir()
    os.utime(half, (0, 0))
    assert store.clean() == 0  # old, but its writer is alive
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert store.size(digest) is None
    assert held(objects) == []
    os.utime(half, (0, 0))
    assert store.clean() == 1
    assert not half.exists()
