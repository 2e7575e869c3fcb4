"""Uploads: checks, deduplication, and repair of damage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select

from images.content import CHUNK_BYTES, SEGMENT_BYTES, ContentLayout, chunk_digest, segment_digest
from images.segment import ChunkEncoding, build_segment, decode_segment, parse_header
from repository.images.tables import ChunkRow, SegmentRow
from repository.service import Repository
from tests.kit.noise import noise
from tests.kit.repository_images import (
    ADA,
    BOB,
    EVE,
    TWO,
    begin,
    layout,
    manifest_of,
    packed,
    pieces,
    read,
    stored,
    sweeper,
)
from tests.kit.repository_jobs import images_of, push, refused, send
from vmjobs.config import Config
from vmjobs.errors import (
    DigestMismatch,
    ImageRejected,
    InvalidRequest,
    MissingChunks,
    NotFound,
    PayloadTooLarge,
)
from vmjobs.wire import Publication

pytestmark = pytest.mark.in_process


@pytest.fixture
def config(request: pytest.FixtureRequest, config: Config) -> Config:
    """The configuration with the test's storage, by default local files."""
    storage = getattr(request, "param", "local")
    url = request.getfixturevalue("s3_url") if storage == "s3" else ""
    return config.model_copy(update={"storage_url": url})


#: For tests that depend on the storage.
BOTH_STORES = pytest.mark.parametrize("config", ["local", "s3"], indirect=True)


@BOTH_STORES
def test_what_was_pushed_is_what_is_read(images: Repository) -> None:
    data = TWO[:SEGMENT_BYTES] + bytes(SEGMENT_BYTES) + TWO[SEGMENT_BYTES:]
    done = push(images, ADA, data, kernel=b"a kernel", name="hep")
    assert read(images, ADA, done) == data
    assert read(images, ADA, done, "kernel") == b"a kernel"
    assert done.size == len(data) + len(b"a kernel")
    assert len(stored(images)) == 3  # two of the disk, none for zeros, one of the kernel
    assert done.stored == sum(info.size for info in images.objects.keys("segments"))
    content = done.manifest["root"]["digest"]
    parts = ContentLayout.parse(images.contents.layout(ADA, done.digest, content), content)
    for offset, length in [
        (0, 1),
        (CHUNK_BYTES - 1, 2),
        (SEGMENT_BYTES - 5, SEGMENT_BYTES + 10),
        (len(data) - 3, 99),
    ]:
        found = b"".join(images.contents.read(parts, offset, length))
        assert found == data[offset : offset + length]
    for number, digest in parts.stored():
        with images.contents.open_segment(ADA, done.digest, digest) as reader:
            assert (
                decode_segment(reader.read(), digest)
                == data[number * SEGMENT_BYTES :][: parts.length(number)]
            )
    report = images.contents.verify(ADA, done.digest, [digest for _, digest in parts.stored()])
    assert (report.checked, report.damaged, report.missing) == (2, (), ())


@pytest.mark.both_databases
def test_a_segment_is_stored_once_whoever_brings_it(images: Repository) -> None:
    upload = begin(images)
    (first, piece), _ = pieces(TWO)
    assert images.uploads.missing_segments(ADA, upload, [first]) == [True]
    assert images.segments.put(ADA, upload, first, packed(piece))
    assert not images.segments.put(ADA, upload, first, packed(piece))
    his = begin(images, BOB)
    assert images.segments.put(BOB, his, first, packed(piece))  # bob does not learn that it is there
    assert not images.segments.put(BOB, begin(images, BOB), first, packed(piece))
    assert len(stored(images)) == 1
    received = [images.uploads.get(ADA, upload).received, images.uploads.get(BOB, his).received]
    assert received == [len(packed(piece))] * 2


@BOTH_STORES
@pytest.mark.both_databases
def test_the_same_segment_at_the_same_moment(images: Repository) -> None:
    (first, piece), _ = pieces(TWO)
    body = packed(piece)
    uploads = [begin(images) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        new = list(pool.map(lambda u: images.segments.put(ADA, u, first, body), uploads * 2))
    assert new.count(True) == 1
    assert len(stored(images)) == 1
    assert sum(images.uploads.get(ADA, upload).received for upload in uploads) == len(body)


@pytest.mark.both_databases
def test_blocks_that_are_here_need_not_be_sent(images: Repository) -> None:
    push(images, ADA, TWO, visibility="public")
    changed = bytearray(TWO[:SEGMENT_BYTES])
    changed[5 * CHUNK_BYTES : 6 * CHUNK_BYTES] = noise(CHUNK_BYTES, 1)
    changed[9 * CHUNK_BYTES : 10 * CHUNK_BYTES] = bytes(CHUNK_BYTES)
    ((digest, piece),) = pieces(bytes(changed))
    blocks = [chunk_digest(piece[i : i + CHUNK_BYTES]) for i in range(0, SEGMENT_BYTES, CHUNK_BYTES)]
    upload = begin(images, BOB)
    missing = images.uploads.missing_chunks(BOB, upload, blocks)
    assert [n for n, is_missing in enumerate(missing) if is_missing] == [5]
    body = packed(piece, [n for n, is_missing in enumerate(missing) if not is_missing])
    assert len(body) < 2 * CHUNK_BYTES
    assert images.segments.put(BOB, upload, digest, body)
    done = images.uploads.begin(BOB, 1)
    again = send(images, BOB, done.id, bytes(changed))
    wish = Publication(manifest=manifest_of(again), upload=done.id)
    assert read(images, BOB, images.publisher.publish(BOB, wish)) == bytes(changed)


def test_a_block_that_is_not_here_is_asked_for(images: Repository) -> None:
    upload = begin(images)
    (first, piece), _ = pieces(TWO)
    with pytest.raises(MissingChunks, match="3 of the 3 blocks"):
        images.segments.put(ADA, upload, first, packed(piece, [0, 7, 127]))
    assert stored(images) == []


def damage(images: Repository, digest: bytes, lose: bool = False) -> None:
    """Change a byte of a stored segment's first chunk, or delete the segment."""
    with images.database.read() as session:
        key = session.scalars(select(SegmentRow.object).where(SegmentRow.digest == digest)).one()
    body = bytearray(images.objects.get(key))
    index = parse_header(bytes(body), whole=len(body))
    body[index.entries[0].offset] ^= 1
    images.objects.delete(key)
    if not lose:
        images.objects.put_bytes(key, bytes(body))


@BOTH_STORES
@pytest.mark.parametrize("lose", [False, True])
def test_a_damaged_segment_is_named_and_heals(images: Repository, lose: bool) -> None:
    done = push(images, ADA, TWO, name="hep")
    (first, piece), _ = pieces(TWO)
    damage(images, first, lose)
    report = images.contents.verify(ADA, done.digest, [digest for digest, _ in pieces(TWO)])
    if lose:
        assert report.missing == (first.hex(),)
    else:
        assert [(d.segment, d.number) for d in report.damaged] == [(first.hex(), 0)]
    with pytest.raises((DigestMismatch, NotFound)):
        read(images, ADA, done)
    upload = begin(images)
    assert images.uploads.missing_segments(ADA, upload, [first]) == [True]
    assert images.uploads.missing_chunks(ADA, upload, [chunk_digest(piece[:CHUNK_BYTES])]) == [True]
    assert images.segments.put(ADA, upload, first, packed(piece))
    assert read(images, ADA, done) == TWO
    assert images.contents.verify(ADA, done.digest, [first]).damaged == ()
    assert len(stored(images)) == 2


def test_a_damaged_block_is_not_copied(images: Repository) -> None:
    push(images, ADA, TWO)
    (first, piece), _ = pieces(TWO)
    damage(images, first)
    changed = piece[:-CHUNK_BYTES] + noise(CHUNK_BYTES, 2)
    ((digest, _),) = pieces(changed)
    upload = begin(images)
    body = packed(changed, [0, 1, 2])
    refused(MissingChunks, lambda: images.segments.put(ADA, upload, digest, body))
    assert images.uploads.missing_segments(ADA, upload, [first]) == [True]  # recorded
    assert images.segments.put(ADA, upload, digest, packed(changed))
    blocks = [chunk_digest(changed[i : i + CHUNK_BYTES]) for i in range(0, SEGMENT_BYTES, CHUNK_BYTES)]
    assert not any(images.uploads.missing_chunks(ADA, upload, blocks))  # the new one has them


def test_a_lie_about_a_blocks_length_is_not_stored(images: Repository) -> None:
    push(images, ADA, TWO)
    piece = TWO[:CHUNK_BYTES]
    real = chunk_digest(piece)
    index = parse_header(packed(TWO[:CHUNK_BYTES]), whole=len(packed(TWO[:CHUNK_BYTES])))
    short = build_segment(index, [(ChunkEncoding.ABSENT, b"")]).replace(
        CHUNK_BYTES.to_bytes(4, "big"), b"\0\0\0\x64", 1
    )
    whole = segment_digest([real])
    refused(MissingChunks, lambda: images.segments.put(ADA, begin(images), whole, short))


def test_damaged_bytes_are_refused(images: Repository) -> None:
    upload = begin(images)
    (first, piece), _ = pieces(TWO)
    body = packed(piece)
    for spoilt in (
        b"",
        body[:-1],
        body + b"x",
        b"QFI\xfb" + body[4:],
        body[:-1] + bytes([body[-1] ^ 1]),
        body[:20] + b"\xff" + body[21:],
        body[:12] + b"\xff\xff\xff\xff" + body[16:],
        b"x" * 1000,
        body[:10],
        body[:8] + (2**31).to_bytes(4, "big") + body[12:],
    ):
        with pytest.raises((DigestMismatch, PayloadTooLarge)):
            images.segments.put(ADA, upload, first, spoilt)
    refused(DigestMismatch, lambda: images.segments.put(ADA, upload, bytes(32), body))
    assert stored(images) == []
    assert images.uploads.get(ADA, upload).received == 0


@pytest.mark.both_databases
def test_a_content_needs_all_of_its_segments(images: Repository) -> None:
    upload = begin(images)
    parts = layout(TWO)
    (first, piece), (second, rest) = pieces(TWO)
    images.segments.put(ADA, upload, first, packed(piece))
    with pytest.raises(MissingChunks, match="1 of the 2 segments"):
        images.uploads.put_content(ADA, upload, parts.digest, parts.to_bytes())
    wish = Publication(manifest=manifest_of(parts), upload=upload)
    refused(MissingChunks, lambda: images.publisher.publish(ADA, wish))
    short = parts.to_bytes()[:-32]
    refused(DigestMismatch, lambda: images.uploads.put_content(ADA, upload, parts.digest, short))
    images.segments.put(ADA, upload, second, packed(rest))
    wrong = ContentLayout(2 * SEGMENT_BYTES, (first, second))
    with pytest.raises(InvalidRequest, match="belong there"):
        images.uploads.put_content(ADA, upload, wrong.digest, wrong.to_bytes())
    for _ in range(2):
        images.uploads.put_content(ADA, upload, parts.digest, parts.to_bytes())
    assert read(images, ADA, images.publisher.publish(ADA, wish)) == TWO


@pytest.mark.both_databases
def test_a_killed_upload_goes_on(images: Repository) -> None:
    before = begin(images)
    (first, piece), (second, rest) = pieces(TWO)
    images.segments.put(ADA, before, first, packed(piece))
    now = begin(images)
    assert images.uploads.missing_segments(ADA, now, [first, second]) == [False, True]
    images.uploads.drop(ADA, before)
    sweeper(images, patience=60).garbage_collector.collect()
    images.segments.put(ADA, now, second, packed(rest))
    parts = layout(TWO)
    images.uploads.put_content(ADA, now, parts.digest, parts.to_bytes())
    wish = Publication(manifest=manifest_of(parts), upload=now)
    assert read(images, ADA, images.publisher.publish(ADA, wish)) == TWO
    again = images.publisher.publish(ADA, wish)  # the answer to the first one was lost
    assert again.digest == images.publisher.publish(ADA, wish.model_copy(update={"upload": ""})).digest
    refused(NotFound, lambda: images.uploads.get(ADA, now))


def test_another_users_upload_does_not_exist(images: Repository) -> None:
    upload = begin(images)
    (first, piece), _ = pieces(TWO)
    parts = send(images, ADA, upload, TWO)
    refused(
        NotFound,
        lambda: images.uploads.get(EVE, upload),
        lambda: images.uploads.drop(EVE, upload),
        lambda: images.uploads.missing_segments(EVE, upload, [first]),
        lambda: images.uploads.missing_chunks(EVE, upload, [first]),
        lambda: images.segments.put(EVE, upload, first, packed(piece)),
        lambda: images.uploads.put_content(EVE, upload, parts.digest, parts.to_bytes()),
        lambda: images.uploads.get(EVE, "0" * 32),
        lambda: images.uploads.get(EVE, "../../etc/passwd"),
    )
    # Knowing a content's digest gives no right to it.
    theft = Publication(manifest=manifest_of(parts), upload=upload)
    refused(MissingChunks, lambda: images.publisher.publish(EVE, theft))
    push(images, ADA, TWO)
    refused(
        MissingChunks, lambda: images.publisher.publish(EVE, theft.model_copy(update={"upload": ""}))
    )


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        ({}, "root"),
        ({"root": {"digest": "tree:" + "0" * 64, "size": 0}}, "size"),
        ({"root": {"digest": "sha256:" + "0" * 64, "size": 1}}, "digest"),
        ({"schema": 1}, "schema"),
        ({"architecture": "../x"}, "architecture"),
        ({"architecture": "sparc64"}, "not supported"),
        ({"kernel": None, "initrd": {"digest": "tree:" + "0" * 64, "size": 1}}, "initrd"),
        ({"name": "a name is no part of an image"}, "name"),
        ({"packages": {"a": "\ud800"}}, "not an image manifest"),
        ({"packages": {"a": float("nan")}}, "packages"),
        ({"cmdline": ["init=/bin/sh\nroot=/dev/sda"]}, "cmdline"),
        ({"root": {"digest": layout(b"a disk").digest, "size": 7}}, "it has 6"),
    ],
)
def test_a_manifest_that_is_none(images: Repository, manifest: dict[str, object], why: str) -> None:
    upload = begin(images)
    parts = send(images, ADA, upload, b"a disk")
    body = {**manifest_of(parts), **manifest} if manifest else {}
    with pytest.raises(ImageRejected, match=why):
        images.publisher.publish(ADA, Publication(manifest=body, upload=upload))


def test_a_disk_that_looks_like_something_else(images: Repository) -> None:
    for disk in (
        b"QFI\xfb\0\0\0\3" + noise(2 * CHUNK_BYTES),
        b"KDMV" + noise(2 * CHUNK_BYTES),
        noise(2 * CHUNK_BYTES) + b"conectix" + bytes(504),
        b"# Disk DescriptorFile\nversion=1\n" + bytes(CHUNK_BYTES),
        b"\x1f\x8b\x08" + noise(CHUNK_BYTES),
    ):
        refused(ImageRejected, lambda disk=disk: push(images, ADA, disk, name="evil"))
    assert images_of(images, ADA) == []
    # A disk may begin with a boot sector or a CD's file system.
    push(
        images,
        ADA,
        bytes(510) + b"\x55\xaa" + bytes(32256) + b"\x01CD001" + bytes(CHUNK_BYTES),
        name="cd",
    )


@pytest.mark.both_databases
def test_block_rows_are_few(images: Repository) -> None:
    """Zeros have no rows, and a chunk has only one."""
    piece = noise(CHUNK_BYTES) * 3 + bytes(CHUNK_BYTES) + noise(100, 3)
    push(images, ADA, piece)
    push(images, ADA, piece + noise(100, 4))
    with images.database.read() as session:
        assert len(session.scalars(select(ChunkRow.digest)).all()) == 3
