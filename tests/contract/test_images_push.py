"""Pushing contents: only missing chunks, digest caches, and repositories that lose data."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from images.content import CHUNK_BYTES, SEGMENT_BYTES, ContentLayout, layout_size
from images.manifest import ImageManifest, Part
from images.segment import ChunkEncoding, parse_header
from images.store.image_store import ImageStore
from images.store.local_gc import MIN_AGE_SECONDS, collect_garbage
from images.transfer.push import send_content
from images.transfer.upload_state import FileDigestCache, UploadState
from repository.images import Viewer
from repository.service import Repository
from tests.kit.segments import compute_layout_of_bytes
from vmjobs.errors import Conflict, InvalidRequest, MissingChunks

ADA = Viewer("ada")


@dataclass
class Receiver:
    """An upload at a real repository, and what was asked and sent.

    clear: whether it reports all chunks as present.
    """

    repository: Repository
    upload: str
    asked: int = 0
    chunk_digests: int = 0
    segments: list[bytes] = field(default_factory=list)
    contents: int = 0
    clear: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def missing_segments(self, digests: Sequence[bytes]) -> list[bool]:
        self.asked += len(digests)
        return self.repository.uploads.missing_segments(ADA, self.upload, digests)

    def missing_chunks(self, digests: Sequence[bytes]) -> list[bool]:
        if self.clear:
            return [False] * len(digests)
        return self.repository.uploads.missing_chunks(ADA, self.upload, digests)

    def put_segment(self, digest: bytes, body: bytearray) -> bool:
        with self.lock:
            self.segments.append(digest)
            index = parse_header(body, whole=len(body))
            self.chunk_digests += sum(
                entry.kind in {ChunkEncoding.PLAIN, ChunkEncoding.ZSTD} for entry in index.entries
            )
        return self.repository.segments.put(ADA, self.upload, digest, bytes(body))

    def put_content(self, digest: str, layout: bytes) -> None:
        self.contents += 1
        self.repository.uploads.put_content(ADA, self.upload, digest, layout)


def receiver(images: Repository) -> Receiver:
    return Receiver(images, images.uploads.begin(ADA, 1 << 30).id)


def file_of(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_each_missing_block_is_sent_once(images: Repository, tmp_path: Path) -> None:
    data = os.urandom(CHUNK_BYTES) + bytes(SEGMENT_BYTES) + os.urandom(SEGMENT_BYTES + CHUNK_BYTES // 2)
    file, to = file_of(tmp_path / "disk", data), receiver(images)
    steps: list[tuple[int, int]] = []
    layout = send_content(file, to, on_progress=lambda done, sent: steps.append((done, sent)))
    assert layout == compute_layout_of_bytes(data)
    assert to.chunk_digests == sum(
        any(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)
    )
    assert steps[-1][0] == len(data)
    assert len(data) - SEGMENT_BYTES < steps[-1][1] < len(data) - SEGMENT_BYTES + 3 * CHUNK_BYTES
    again = receiver(images)
    assert send_content(file, again) == layout
    assert (again.segments, again.contents) == ([], 1)


def test_holes_are_neither_read_nor_asked_for(images: Repository, tmp_path: Path) -> None:
    file, to = tmp_path / "disk", receiver(images)
    with file.open("wb") as sink:
        sink.truncate(100 * SEGMENT_BYTES + 1)
    layout = send_content(file, to)
    assert (to.asked, to.segments, layout.size) == (0, [], 100 * SEGMENT_BYTES + 1)


def test_blocks_that_are_gone_are_sent_after_all(images: Repository, tmp_path: Path) -> None:
    data = os.urandom(SEGMENT_BYTES)
    to = receiver(images)
    to.clear = True
    send_content(file_of(tmp_path / "disk", data), to)
    assert len(to.segments) == 2
    assert to.chunk_digests == SEGMENT_BYTES // CHUNK_BYTES


def test_segments_that_are_gone_are_sent_after_all(images: Repository, tmp_path: Path) -> None:
    """The upload is aborted and its bytes are collected just before the content is made."""
    file = file_of(tmp_path / "disk", os.urandom(SEGMENT_BYTES))

    class Forgetful(Receiver):
        def put_content(self, digest: str, layout: bytes) -> None:
            super().put_content(digest, layout)
            if self.contents == 1:
                raise MissingChunks("1 of the 1 segments are not here")

    to = Forgetful(images, images.uploads.begin(ADA, 1 << 30).id)
    send_content(file, to)
    assert to.contents == 2


def test_a_layout_that_is_known_saves_reading(images: Repository, tmp_path: Path) -> None:
    data = os.urandom(3 * SEGMENT_BYTES)
    file = file_of(tmp_path / "disk", data)
    send_content(file, receiver(images))
    known = compute_layout_of_bytes(data)
    # Nothing is missing, so its bytes are never read.
    file.write_bytes(bytes(len(data)))
    again = receiver(images)
    assert send_content(file, again, layout=known) == known
    assert again.segments == []


def test_files_that_cannot_be_sent(images: Repository, tmp_path: Path) -> None:
    for path in (file_of(tmp_path / "empty", b""), tmp_path / "nothing", tmp_path):
        with pytest.raises(InvalidRequest):
            send_content(path, receiver(images))


@pytest.mark.parametrize("what", ["grow", "shrink", "write"])
def test_a_file_that_changes(images: Repository, tmp_path: Path, what: str) -> None:
    file = file_of(tmp_path / "disk", os.urandom(4 * SEGMENT_BYTES))

    class Meddler(Receiver):
        def missing_segments(self, digests: Sequence[bytes]) -> list[bool]:
            with file.open("r+b") as sink:
                if what == "write":
                    sink.write(b"other")
                else:
                    sink.truncate(5 * SEGMENT_BYTES if what == "grow" else SEGMENT_BYTES)
            return super().missing_segments(digests)

    to = Meddler(images, images.uploads.begin(ADA, 1 << 30).id)
    with pytest.raises(Conflict, match="changed while it was being pushed"):
        send_content(file, to)
    assert to.contents == 0


def test_notes_save_reading_until_the_file_changes(images: Repository, tmp_path: Path) -> None:
    file = file_of(tmp_path / "disk", os.urandom(2 * SEGMENT_BYTES))
    with closing(FileDigestCache.open(tmp_path / "notes", file)) as notes:
        assert notes.chunk_digests(0, 128) is None
        layout = send_content(file, receiver(images), digest_cache=notes)
    with closing(FileDigestCache.open(tmp_path / "notes", file)) as notes:
        assert len(notes.chunk_digests(1, 128) or ()) == SEGMENT_BYTES // CHUNK_BYTES
        assert send_content(file, receiver(images), digest_cache=notes) == layout
    with file.open("r+b") as sink:
        sink.write(b"x")
    with closing(FileDigestCache.open(tmp_path / "notes", file)) as notes:
        assert notes.chunk_digests(1, 128) is None


def test_broken_notes_are_none(images: Repository, tmp_path: Path) -> None:
    file = file_of(tmp_path / "disk", os.urandom(2 * SEGMENT_BYTES))
    folder = tmp_path / "notes"
    with closing(FileDigestCache.open(folder, file)) as notes:
        send_content(file, receiver(images), digest_cache=notes)
    (path,) = folder.iterdir()
    good = path.read_bytes()
    for bad in (good[:-1], good + b"\0" * 5, good + b"\xff" * 100, good[:30], b"", b"x" * 10000):
        path.write_bytes(bad)
        with closing(FileDigestCache.open(folder, file)) as notes:
            send_content(file, receiver(images), digest_cache=notes)
    assert path.read_bytes() == good
    # The repository notices wrong digests, and the cache drops them.
    path.write_bytes(good[:-32] + b"\1" * 32)
    with (
        closing(FileDigestCache.open(folder, file)) as notes,
        pytest.raises(Exception, match=r"segment|chunk"),
    ):
        send_content(file, receiver(images), digest_cache=notes)
    with closing(FileDigestCache.open(folder, file)) as notes:
        send_content(file, receiver(images), digest_cache=notes)


def test_notes_are_for_one_at_a_time_and_for_oneself(tmp_path: Path) -> None:
    file, folder = file_of(tmp_path / "disk", b"x" * 10), tmp_path / "notes"
    with (
        closing(FileDigestCache.open(folder, file)) as first,
        closing(FileDigestCache.open(folder, file)) as second,
    ):
        first.save(0, [b"\1" * 32])
        assert first.chunk_digests(0, 1) == [b"\1" * 32]
        second.save(1, [b"\1" * 32])
        assert second.chunk_digests(1, 1) is None
    assert folder.stat().st_mode & 0o777 == 0o700
    no_folder = file_of(tmp_path / "file", b"")
    with closing(FileDigestCache.open(no_folder, file)) as notes:
        notes.save(0, [b"\1" * 32])
        assert notes.chunk_digests(0, 1) is None
    note = UploadState(folder, "http://a", "disk")
    assert note.load() == ""
    note.save("abc")
    assert UploadState(folder, "http://a", "disk").load() == ""  # a running push holds it
    assert UploadState(folder, "http://b", "disk").load() == ""
    del note
    later = UploadState(folder, "http://a", "disk")
    assert later.load() == "abc"
    later.save("defg")
    assert later.load() == "defg"
    later.clear()
    assert UploadState(folder, "http://a", "disk").load() == ""


def test_garbage_in_the_local_store(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    named, nameless, alone = (_stored(store, data) for data in (b"a" * 100, b"b" * 100, b"c" * 100))
    image = store.put_manifest(ImageManifest(root=named))
    other = store.put_manifest(ImageManifest(root=nameless))
    store.tag("kept", "latest", image)
    assert collect_garbage(store).contents == 0, "a build may be at it"
    contents = [store.folder.path(part.digest) for part in (named, nameless, alone)]
    for path in [*contents, *tmp_path.glob("manifests/*")]:
        old = path.stat().st_mtime - MIN_AGE_SECONDS - 1
        os.utime(path, (old, old))
    report = collect_garbage(store, dry_run=True)
    assert (report.images, report.contents) == (1, 2)
    assert store.complete(other)
    assert collect_garbage(store) == report
    assert store.complete(image)
    assert not store.folder.has(nameless.digest)
    assert not store.folder.has(alone.digest)
    assert not store.has_manifest(other)


def _stored(store: ImageStore, data: bytes) -> Part:
    file = file_of(store.root / "source", data)
    return store.folder.add_file(file)


def test_layouts_of_large_contents_have_the_size_that_is_expected() -> None:
    for size in (1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 100 * SEGMENT_BYTES):
        digests = tuple([b"\0" * 32] * -(-size // SEGMENT_BYTES))
        assert len(ContentLayout(size, digests).to_bytes()) == layout_size(size)
