"""Uploads: limits, quotas, and storage that is full or does not answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from images.content import CHUNK_BYTES, SEGMENT_BYTES, ContentLayout, zero_segment_digest
from repository.db.database import Database
from repository.service import Repository
from repository.storage.objects import open_objects
from tests.kit.full_disk import small_disk
from tests.kit.noise import noise
from tests.kit.repository_images import (
    ADA,
    BOB,
    EVE,
    MIB,
    TWO,
    begin,
    layout,
    manifest_of,
    packed,
    pieces,
    read,
    stored,
)
from tests.kit.repository_jobs import push, refused, send, with_settings
from tests.kit.s3_server import S3Server
from vmjobs.config import Config
from vmjobs.errors import (
    Conflict,
    ImageRejected,
    MissingChunks,
    PayloadTooLarge,
    QuotaExceeded,
    StorageFull,
    Unavailable,
)
from vmjobs.wire import Publication

pytestmark = pytest.mark.in_process


def test_more_than_was_announced(images: Repository) -> None:
    upload = begin(images, size=SEGMENT_BYTES)
    (first, piece), (second, rest) = pieces(TWO)
    images.segments.put(ADA, upload, first, packed(piece))
    with pytest.raises(QuotaExceeded, match=f"{SEGMENT_BYTES} bytes of content"):
        images.segments.put(ADA, upload, second, packed(rest))
    assert len(stored(images)) == 1
    assert images.uploads.get(ADA, upload).received == len(packed(piece))
    assert not images.segments.put(ADA, upload, first, packed(piece))


def test_a_content_of_nothing_but_zeros_costs_its_layout(images: Repository) -> None:
    images = with_settings(images, image_quota=1, max_image_size=1 << 20)
    upload = begin(images, size=1 << 40)
    zeros = ContentLayout(20_000 * SEGMENT_BYTES, (zero_segment_digest(),) * 20_000)
    for _ in range(2):
        images.uploads.put_content(ADA, upload, zeros.digest, zeros.to_bytes())
        assert images.uploads.get(ADA, upload).received == len(zeros.to_bytes())
    last = ContentLayout(19_000 * SEGMENT_BYTES, (zero_segment_digest(),) * 19_000)
    with pytest.raises(QuotaExceeded, match="1 MiB"):
        images.uploads.put_content(ADA, upload, last.digest, last.to_bytes())


def test_uploads_without_end(images: Repository) -> None:
    uploads = [images.uploads.begin(ADA, 1).id for _ in range(images.config.max_open_uploads)]
    with pytest.raises(Conflict, match="open already"):
        images.uploads.begin(ADA, 1)
    images.uploads.begin(EVE, 1)
    images.uploads.drop(ADA, uploads[0])
    images.uploads.begin(ADA, 1)


@pytest.mark.both_databases
def test_a_quota(images: Repository) -> None:
    images = with_settings(images, image_quota=9)
    push(images, ADA, noise(6 * MIB, 1), name="first")
    upload = begin(images)
    for seed in range(2, 5):
        ((digest, piece),) = pieces(noise(MIB - 64 * 1024, seed))
        images.segments.put(ADA, upload, digest, packed(piece))
    ((digest, piece),) = pieces(noise(MIB, 9))
    with pytest.raises(QuotaExceeded, match="9 MiB"):
        images.segments.put(ADA, upload, digest, packed(piece))
    assert images.uploads.missing_segments(ADA, upload, [digest]) == [True]
    assert images.segments.put(BOB, begin(images, BOB), digest, packed(piece))
    images.uploads.drop(ADA, upload)  # frees the space
    upload = begin(images)
    ((digest, piece),) = pieces(noise(MIB, 10))
    assert images.segments.put(ADA, upload, digest, packed(piece))
    images.catalog.remove(ADA, images.catalog.resolve(ADA, "first"))
    push(images, ADA, noise(7 * MIB, 1), name="second")
    # An image that others hold counts for each holder.
    other = push(images, BOB, noise(5 * MIB, 3), visibility="public")
    refused(
        QuotaExceeded,
        lambda: images.catalog.tag(ADA, "", "third", "latest", other.digest),
        lambda: push(images, ADA, noise(5 * MIB, 3)),
    )


@pytest.mark.both_databases
def test_quota_at_the_same_moment(images: Repository) -> None:
    images = with_settings(images, image_quota=3)
    uploads = [begin(images) for _ in range(3)]

    def put(seed: int) -> bool:
        ((digest, piece),) = pieces(noise(MIB - CHUNK_BYTES, seed))
        try:
            return images.segments.put(ADA, uploads[seed % 3], digest, packed(piece))
        except QuotaExceeded:
            return False

    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(put, range(9)))
    assert done.count(True) == 3
    assert len(stored(images)) == 3


def test_too_large(images: Repository) -> None:
    small = with_settings(images, max_image_size=1)
    upload = small.uploads.begin(ADA, 2 * MIB).id
    parts = layout(bytes(MIB + 1))
    refused(
        PayloadTooLarge,
        lambda: small.uploads.begin(ADA, 100 * MIB),
        lambda: small.uploads.put_content(ADA, upload, parts.digest, parts.to_bytes()),
        lambda: small.segments.put(ADA, upload, bytes(32), bytes(SEGMENT_BYTES + 2 * MIB)),
    )
    images.uploads.put_content(ADA, upload, parts.digest, parts.to_bytes())
    with pytest.raises(ImageRejected, match="the limit here is 1 MiB"):
        small.publisher.publish(ADA, Publication(manifest=manifest_of(parts), upload=upload))


@pytest.mark.starts_processes
def test_no_room_in_the_middle_of_an_upload(config: Config, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 12) as place:
        chosen = config.model_copy(update={"storage_url": str(place / "objects")})
        database = Database(config.database)
        images = Repository(chosen, database, open_objects(chosen))
        upload = begin(images)
        parts, wanted = layout(TWO + noise(6 * MIB, 5)), pieces(TWO + noise(6 * MIB, 5))
        (place / "others").write_bytes(bytes(2 * MIB))
        images.segments.put(ADA, upload, wanted[0][0], packed(wanted[0][1]))
        before = images.uploads.get(ADA, upload).received
        body = packed(wanted[1][1])
        refused(StorageFull, lambda: images.segments.put(ADA, upload, wanted[1][0], body))
        assert images.uploads.get(ADA, upload).received == before
        assert len(stored(images)) == 1
        (place / "others").unlink()
        wanted[1:] = pieces(TWO[SEGMENT_BYTES:])  # a smaller one fits
        images.segments.put(ADA, upload, wanted[1][0], packed(wanted[1][1]))
        with pytest.raises(MissingChunks):
            images.uploads.put_content(ADA, upload, parts.digest, parts.to_bytes())
        parts = send(images, ADA, upload, TWO)
        done = images.publisher.publish(ADA, Publication(manifest=manifest_of(parts), upload=upload))
        assert read(images, ADA, done) == TWO
        database.close()


@pytest.mark.starts_processes
def test_a_storage_that_goes_away_and_comes_back(config: Config, own_s3_server: S3Server) -> None:
    url = own_s3_server.url(own_s3_server.bucket())
    chosen = config.model_copy(update={"storage_url": url})
    database = Database(config.database)
    images = Repository(chosen, database, open_objects(chosen))
    upload = begin(images)
    (first, piece), (second, rest) = pieces(TWO)
    images.segments.put(ADA, upload, first, packed(piece))
    own_s3_server.kill()
    with pytest.raises(Unavailable) as caught:
        images.segments.put(ADA, upload, second, packed(rest))
    assert caught.value.service == "storage"
    changed = noise(CHUNK_BYTES, 3) + piece[CHUNK_BYTES:]
    ((digest, _),) = pieces(changed)
    refused(Unavailable, lambda: images.segments.put(ADA, upload, digest, packed(changed, [5])))
    own_s3_server.start()
    # A missing answer does not mean damage.
    assert images.uploads.missing_segments(ADA, upload, [first, second]) == [False, True]
    parts = send(images, ADA, upload, TWO)
    done = images.publisher.publish(ADA, Publication(manifest=manifest_of(parts), upload=upload))
    assert read(images, ADA, done) == TWO
    database.close()
