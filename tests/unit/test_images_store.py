"""The image store: files are complete or absent, and checked when read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from images.content import SEGMENT_BYTES
from images.manifest import ImageManifest, Part
from images.store.image_store import ImageStore
from tests.kit.image_cache import damage, put
from tests.kit.segments import compute_layout_of_bytes
from vmjobs.errors import DigestMismatch, InvalidRequest, NotFound
from vmjobs.hypervisor.base import BootImage
from vmjobs.model import BootMethod, HypervisorKind

DISK = os.urandom(100_000) + bytes(5_000_000) + b"end" + bytes(1_000_000)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path)


@pytest.fixture
def digest(store: ImageStore) -> str:
    """Return the digest of an image with a kernel in the store."""
    return put(store, DISK)[0]


@pytest.mark.parametrize(
    "size", [1, 65535, 65536, 65537, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3_000_001]
)
@pytest.mark.parametrize("fill", [b"\0", b"x"])
def test_contents_of_any_size(store: ImageStore, size: int, fill: bytes) -> None:
    data = fill * size
    expected = compute_layout_of_bytes(data)
    assert store.folder.put(data) == Part(digest=expected.digest, size=size)
    assert store.folder.layout(expected.digest) == expected
    assert store.folder.verify(expected.digest).read_bytes() == data


def test_a_file_is_added_as_it_is_and_its_holes_are_not_read(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    source = tmp_path / "disk"
    with source.open("wb") as file:
        file.write(b"begin")
        file.seek(40 * 1024**3)
        file.write(b"end")
        file.seek(70_000)
        file.write(bytes(10_000_000))
    seen: list[int] = []
    part = store.folder.add_file(source, seen.append)
    assert part.size == source.stat().st_size == seen[-1]
    path = store.folder.verify(part.digest)
    assert path.stat().st_blocks * 512 < 1_000_000
    with path.open("rb") as file:
        assert file.read(5) == b"begin"
        file.seek(40 * 1024**3)
        assert file.read() == b"end"
    with source.open("rb") as file:
        assert store.folder.add_file(file) == part


def test_nothing_and_what_is_no_file_is_not_added(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    empty, pipe = tmp_path / "empty", tmp_path / "pipe"
    empty.touch()
    os.mkfifo(pipe)
    with pytest.raises(InvalidRequest, match="empty"):
        store.folder.add_file(empty)
    with pytest.raises(InvalidRequest, match="empty"):
        store.folder.put(b"")
    with (
        os.fdopen(os.open(pipe, os.O_RDWR), "rb", buffering=0) as file,
        pytest.raises(InvalidRequest, match="regular file"),
    ):
        store.folder.add_file(file)
    assert list(store.folder.list()) == []
    assert list((tmp_path / "store" / "tmp").iterdir()) == []


def test_storing_a_content_again_leaves_the_file_but_mends_a_damaged_one(store: ImageStore) -> None:
    digest = store.folder.put(DISK).digest
    path = store.folder.verify(digest)
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        store.folder.put(DISK)
        assert os.fstat(file.fileno()) == before, "who pushes it would take it for changed"
    damage(path)
    store.folder.put(DISK)
    assert store.folder.verify(digest).read_bytes() == DISK


def test_a_layout_that_was_lost_or_damaged_is_made_again(store: ImageStore) -> None:
    part = store.folder.put(DISK)
    beside = store.folder.verify(part.digest).with_suffix(".layout")
    good = beside.read_bytes()
    beside.unlink()
    assert store.folder.layout(part.digest) == compute_layout_of_bytes(DISK)
    assert beside.read_bytes() == good
    beside.write_bytes(good[:-1])
    assert store.folder.layout(part.digest) == compute_layout_of_bytes(DISK)
    assert beside.read_bytes() == good
    with pytest.raises(NotFound):
        store.folder.layout("tree:" + "0" * 64)


def test_references_are_resolved(digest: str, store: ImageStore) -> None:
    store.tag("tiny", "latest", digest)
    store.tag("tiny", "1.0", digest)
    assert {store.resolve(ref) for ref in ("tiny", "tiny:latest", "tiny:1.0", digest)} == {digest}
    store.tag("library/tiny", "2", digest)
    store.tag("tiny/latest", "2", digest)
    assert store.resolve("library/tiny:2") == store.resolve("tiny/latest:2") == digest
    assert [(e.name, e.tag, e.digest) for e in store.list()] == [
        ("tiny", "1.0", digest),
        ("tiny", "latest", digest),
        ("library/tiny", "2", digest),
        ("tiny/latest", "2", digest),
    ]
    assert store.list()[0].size == len(DISK) + len(b"kernel")


@pytest.mark.parametrize(
    "ref",
    [
        *("other", "tiny:2", "", "../tags", "tiny:../latest", "sha256:" + "0" * 64),
        *("a/tiny", "_/tiny", "../tiny", "/tiny", "a/b/tiny", "./tiny", "tiny:latest/x"),
    ],
)
def test_what_is_not_there_is_not_found_and_the_hint_says_what_is(
    digest: str, store: ImageStore, ref: str
) -> None:
    store.tag("tiny", "latest", digest)
    with pytest.raises(NotFound) as caught:
        store.resolve(ref)
    if not ref.startswith("sha256:"):
        assert "tiny:latest" in caught.value.hint


def test_a_name_that_is_taken_away_leaves_the_image(digest: str, store: ImageStore) -> None:
    store.tag("tiny", "1", digest)
    for name, tag in (("tiny", "1"), ("tiny", "1"), ("other", "1"), ("../x", "1")):
        store.untag(name, tag)
    with pytest.raises(NotFound):
        store.resolve("tiny:1")
    assert store.resolve(digest) == digest


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        *(("../x", "1"), ("x", "../1"), ("x", ""), ("X", "1"), ("x", "a/b"), ("x", "1\n")),
        *(("../a/x", "1"), ("_/x", "1"), ("/x", "1"), ("x/", "1"), ("a/b/x", "1"), ("a" * 65, "1")),
    ],
)
def test_tags_cannot_lead_elsewhere(digest: str, store: ImageStore, name: str, tag: str) -> None:
    with pytest.raises(InvalidRequest):
        store.tag(name, tag, digest)


@pytest.mark.parametrize(
    "digest", ["sha256:../../etc/passwd", "tree:../../etc/passwd", "tree:" + "A" * 64, "md5:0", ""]
)
def test_digests_cannot_lead_elsewhere(store: ImageStore, digest: str) -> None:
    with pytest.raises(NotFound):
        store.folder.verify(digest)
    with pytest.raises(NotFound):
        store.folder.layout(digest)
    with pytest.raises(NotFound):
        store.manifest(digest)


def test_a_manifest_whose_contents_are_missing_is_refused(tmp_path: Path) -> None:
    _, manifest = put(ImageStore(tmp_path / "a"), DISK)
    with pytest.raises(NotFound, match=manifest.root.digest):
        ImageStore(tmp_path / "b").put_manifest(manifest)


def test_an_image_is_prepared_for_booting(store: ImageStore) -> None:
    digest, manifest = put(store, DISK)
    image = store.prepare(digest)
    assert image.root.read_bytes() == DISK
    assert image.kernel is not None
    assert image.kernel.read_bytes() == b"kernel"
    assert (image.digest, image.initrd, image.cmdline) == (digest, None, manifest.cmdline)
    assert image.kinds == (HypervisorKind.KVM, HypervisorKind.QEMU)
    assert store.cached() == [digest]
    with store.lease(digest) as leased:
        assert leased == image


def test_how_an_image_boots_is_told_to_the_hypervisor(store: ImageStore) -> None:
    root = store.folder.put(DISK)
    path = store.folder.verify(root.digest)
    digest = store.put_manifest(ImageManifest(root=root, boot=BootMethod.UEFI, cloud_init=True))
    assert store.prepare(digest) == BootImage(
        digest=digest,
        root=path,
        boot=BootMethod.UEFI,
        cloud_init=True,
        kinds=(HypervisorKind.KVM, HypervisorKind.QEMU),
        architecture="x86_64",
    )
    digest = store.put_manifest(ImageManifest(root=root, partition=2, architecture="aarch64"))
    assert store.prepare(digest) == BootImage(
        digest=digest, root=path, partition=2, kinds=(), architecture="aarch64"
    )


def test_a_damaged_content_is_found_and_named_even_after_it_was_found_good(
    store: ImageStore, tmp_path: Path
) -> None:
    digest, manifest = put(store, DISK)
    path = store.prepare(digest).root
    damage(path)
    for reader in (store, ImageStore(tmp_path)):
        with pytest.raises(DigestMismatch, match=f"{manifest.root.digest} is damaged"):
            reader.prepare(digest)
        with pytest.raises(DigestMismatch, match=str(path)):
            reader.folder.verify(manifest.root.digest)


def test_a_content_that_is_cut_short_and_a_damaged_manifest_are_found_and_named(
    tmp_path: Path, store: ImageStore, digest: str
) -> None:
    os.truncate(store.folder.verify(store.manifest(digest).root.digest), 1000)
    with pytest.raises(DigestMismatch, match="1000 bytes"):
        store.prepare(digest)
    file = tmp_path / "manifests" / f"{digest[7:]}.json"
    file.write_bytes(file.read_bytes().replace(b"init=/x", b"init=/y"))
    with pytest.raises(DigestMismatch, match=digest):
        store.resolve(digest)


def test_what_a_crash_left_is_removed_and_what_is_being_written_stays(
    store: ImageStore, tmp_path: Path
) -> None:
    put(store, DISK)
    (tmp_path / "tmp" / "left-by-a-crash").write_bytes(b"half a content")
    source = tmp_path / "source"
    source.write_bytes(b"slowly")

    def open_another(_written: int) -> None:
        ImageStore(tmp_path)
        assert not (tmp_path / "tmp" / "left-by-a-crash").exists()

    digest = store.folder.add_file(source, open_another).digest
    assert store.folder.verify(digest).read_bytes() == b"slowly"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_writer_that_fails_leaves_nothing(store: ImageStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(DISK)

    def fail(_written: int) -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        store.folder.add_file(source, fail)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (tmp_path / "contents").exists()


def test_builds_are_remembered_while_their_image_is_complete(store: ImageStore) -> None:
    digest, manifest = put(store, DISK)
    key = "0" * 64
    assert store.built(key) is None
    store.record_build(key, digest)
    assert store.built(key) == digest
    store.folder.verify(manifest.root.digest).unlink()
    assert store.built(key) is None
