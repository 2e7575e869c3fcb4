"""The image store and the node's cache: whole files or none, checked when read."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from images.cache import ImageCache
from images.manifest import Blob, ImageManifest
from images.store import ImageStore
from vmjobs.errors import DigestMismatch, InvalidRequest, NotFound, Unavailable
from vmjobs.ports import Progress

DISK = os.urandom(100_000) + bytes(5_000_000) + b"end" + bytes(1_000_000)


def fill(store: ImageStore, disk: bytes = DISK) -> tuple[str, ImageManifest]:
    """Put an image with a kernel into ``store``; its digest and manifest."""
    root, size = store.put_blob(io.BytesIO(disk))
    kernel, kernel_size = store.put_blob(io.BytesIO(b"kernel"))
    manifest = ImageManifest(
        name="tiny",
        root=Blob(digest=root, size=size, format="raw"),
        kernel=Blob(digest=kernel, size=kernel_size),
        cmdline=("init=/x",),
    )
    return store.put_manifest(manifest), manifest


def damage(path: Path) -> None:
    """Change one byte, as a bad disk or a bad copy would."""
    with path.open("r+b") as file:
        file.seek(50_000)
        byte = file.read(1)[0]
        file.seek(50_000)
        file.write(bytes([byte ^ 1]))


# ------------------------------------------------------------------ store


def test_blobs_come_back_as_they_were_and_zeros_take_no_room(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    digest, size = store.put_blob(io.BytesIO(DISK))
    path = store.blob_path(digest)
    assert (path.read_bytes(), size) == (DISK, len(DISK))
    assert path.stat().st_blocks * 512 < len(DISK) / 4
    assert path == tmp_path / "blobs" / "sha256" / digest[7:9] / digest[7:]


def test_an_empty_blob_and_one_that_is_all_zeros(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    for data in (b"", bytes(3_000_001)):
        digest, size = store.put_blob(io.BytesIO(data))
        assert store.blob_path(digest).read_bytes() == data
        assert size == len(data)


def test_references_are_resolved(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    digest, _ = fill(store)
    store.tag("tiny", "latest", digest)
    store.tag("tiny", "1.0", digest)
    assert {store.resolve(ref) for ref in ("tiny", "tiny:latest", "tiny:1.0", digest)} == {digest}
    assert [(e.name, e.tag, e.digest) for e in store.list()] == [
        ("tiny", "1.0", digest),
        ("tiny", "latest", digest),
    ]


@pytest.mark.parametrize(
    "ref", ["other", "tiny:2", "", "../tags", "tiny:../latest", "sha256:" + "0" * 64]
)
def test_what_is_not_there_is_not_found_and_the_hint_says_what_is(tmp_path: Path, ref: str) -> None:
    store = ImageStore(tmp_path)
    digest, _ = fill(store)
    store.tag("tiny", "latest", digest)
    with pytest.raises(NotFound) as caught:
        store.resolve(ref)
    if not ref.startswith("sha256:"):
        assert "tiny:latest" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "tag"), [("../x", "1"), ("x", "../1"), ("x", ""), ("X", "1"), ("x", "a/b")]
)
def test_tags_cannot_lead_elsewhere(tmp_path: Path, name: str, tag: str) -> None:
    store = ImageStore(tmp_path)
    digest, _ = fill(store)
    with pytest.raises(InvalidRequest):
        store.tag(name, tag, digest)


@pytest.mark.parametrize(
    "digest", ["sha256:../../etc/passwd", "sha256:" + "A" * 64, "md5:" + "0" * 64, ""]
)
def test_digests_cannot_lead_elsewhere(tmp_path: Path, digest: str) -> None:
    store = ImageStore(tmp_path)
    with pytest.raises(NotFound):
        store.blob_path(digest)
    with pytest.raises(NotFound):
        store.manifest(digest)
    with pytest.raises(NotFound):
        ImageCache(tmp_path, Remote(store)).prepare(digest)


def test_a_manifest_whose_blobs_are_missing_is_refused(tmp_path: Path) -> None:
    _, manifest = fill(ImageStore(tmp_path / "a"))
    with pytest.raises(NotFound, match=manifest.root.digest):
        ImageStore(tmp_path / "b").put_manifest(manifest)


def test_an_image_is_prepared_for_booting(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    digest, manifest = fill(store)
    image = store.prepare(digest)
    assert image.root.read_bytes() == DISK
    assert image.kernel is not None
    assert image.kernel.read_bytes() == b"kernel"
    assert (image.digest, image.initrd, image.cmdline) == (digest, None, manifest.cmdline)
    assert store.cached() == [digest]


def test_a_damaged_blob_is_found_and_named_even_after_it_was_found_good(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    digest, manifest = fill(store)
    path = store.prepare(digest).root
    damage(path)
    for reader in (store, ImageStore(tmp_path)):
        with pytest.raises(DigestMismatch, match=f"{manifest.root.digest} is damaged"):
            reader.prepare(digest)
        with pytest.raises(DigestMismatch, match=str(path)):
            reader.blob_path(manifest.root.digest)


def test_a_blob_that_is_cut_short_is_found(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    digest, manifest = fill(store)
    os.truncate(store.blob_path(manifest.root.digest), 1000)
    with pytest.raises(DigestMismatch, match="1000 bytes"):
        store.prepare(digest)


def test_a_damaged_manifest_is_found_and_named(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    digest, _ = fill(store)
    file = tmp_path / "manifests" / f"{digest[7:]}.json"
    file.write_bytes(file.read_bytes().replace(b"tiny", b"tinY"))
    with pytest.raises(DigestMismatch, match=digest):
        store.resolve(digest)


def test_what_a_crash_left_is_removed_and_what_is_being_written_stays(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    fill(store)
    (tmp_path / "tmp" / "left-by-a-crash").write_bytes(b"half a blob")
    with store.folder.receive() as incoming:
        incoming.sink.write(b"slowly")
        ImageStore(tmp_path)
        assert not (tmp_path / "tmp" / "left-by-a-crash").exists()
        digest, _ = incoming.commit()
    assert store.blob_path(digest).read_bytes() == b"slowly"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    class Broken(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise OSError("the disk is gone")

    store = ImageStore(tmp_path)
    with pytest.raises(OSError, match="gone"):
        store.put_blob(Broken())
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (tmp_path / "blobs").exists()


def test_builds_are_remembered_while_their_image_is_complete(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    digest, manifest = fill(store)
    key = "0" * 64
    assert store.built(key) is None
    store.record_build(key, digest)
    assert store.built(key) == digest
    store.blob_path(manifest.root.digest).unlink()
    assert store.built(key) is None


# ------------------------------------------------------------------ cache


class Remote:
    """A fetcher that reads from a store, counts, and can fail."""

    def __init__(self, store: ImageStore) -> None:
        self.store = store
        self.blobs: list[str] = []
        self.cut_off = False
        self.garbage = b""

    def manifest(self, digest: str) -> bytes:
        return self.store.manifest_bytes(digest)

    def blob(
        self, image_digest: str, blob_digest: str, sink: BinaryIO, progress: Progress | None = None
    ) -> None:
        self.blobs.append(blob_digest)
        data = self.store.blob_path(blob_digest).read_bytes()
        sink.write(data[: len(data) // 2])
        if self.cut_off:
            raise Unavailable("api", "connection lost")
        sink.write(data[len(data) // 2 :] + self.garbage)


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(ImageStore(tmp_path / "remote"))


def test_an_image_is_fetched_once_and_kept_sparse(tmp_path: Path, remote: Remote) -> None:
    digest, manifest = fill(remote.store)
    cache = ImageCache(tmp_path / "node", remote)
    seen: list[tuple[int, int]] = []
    image = cache.prepare(digest, lambda done, total: seen.append((done, total)))
    total = len(DISK) + len(b"kernel")
    assert image.root.read_bytes() == DISK
    assert image.root.stat().st_blocks * 512 < len(DISK) / 4
    assert seen[-1] == (total, total)
    assert seen[0][0] < total
    assert ImageCache(tmp_path / "node", remote).prepare(digest) == image
    assert sorted(remote.blobs) == sorted(blob.digest for blob in manifest.blobs())
    assert cache.cached() == [digest]


def test_many_at_once_fetch_once(tmp_path: Path, remote: Remote) -> None:
    digest, _ = fill(remote.store)
    start = threading.Barrier(8)
    found = []

    def job() -> None:
        cache = ImageCache(tmp_path / "node", remote)
        start.wait(10)
        found.append(cache.prepare(digest).root.read_bytes() == DISK)

    threads = [threading.Thread(target=job) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [True] * 8
    assert len(remote.blobs) == 2


def test_a_fetch_that_is_cut_off_leaves_nothing_and_the_next_one_succeeds(
    tmp_path: Path, remote: Remote
) -> None:
    digest, _ = fill(remote.store)
    cache = ImageCache(tmp_path / "node", remote)
    remote.cut_off = True
    with pytest.raises(Unavailable):
        cache.prepare(digest)
    assert cache.cached() == []
    assert list((tmp_path / "node" / "tmp").iterdir()) == []
    remote.cut_off = False
    assert cache.prepare(digest).root.read_bytes() == DISK


def test_other_bytes_than_asked_for_are_never_kept(tmp_path: Path, remote: Remote) -> None:
    digest, manifest = fill(remote.store)
    remote.garbage = b"!"
    cache = ImageCache(tmp_path / "node", remote)
    with pytest.raises(DigestMismatch, match=manifest.root.digest):
        cache.prepare(digest)
    assert cache.cached() == []


def test_a_cached_image_that_is_damaged_is_fetched_again(tmp_path: Path, remote: Remote) -> None:
    digest, _ = fill(remote.store)
    cache = ImageCache(tmp_path / "node", remote)
    damage(cache.prepare(digest).root)
    assert cache.prepare(digest).root.read_bytes() == DISK
    assert len(remote.blobs) == 3


def test_an_image_that_nobody_has_is_not_found(tmp_path: Path, remote: Remote) -> None:
    with pytest.raises(NotFound):
        ImageCache(tmp_path / "node", remote).prepare("sha256:" + "0" * 64)
