"""Who owns which bytes: a digest gives no access, and does not reveal that they exist."""

from __future__ import annotations

import io
from datetime import datetime

import pytest
from sqlalchemy import delete

from images.content import CHUNK_BYTES, SEGMENT_BYTES, digest_chunks
from repository.db.models import BlobOwnerRow
from repository.images import Viewer
from repository.service import Repository
from tests.kit.noise import noise
from tests.kit.repository_images import (
    ADA,
    BOB,
    EVE,
    MIB,
    begin,
    layout,
    manifest_of,
    packed,
    pieces,
    sweeper,
)
from tests.kit.repository_jobs import bring, claim, digest_of, one, push, refused
from vmjobs.errors import InvalidSpec, MissingChunks, NotFound, QuotaExceeded
from vmjobs.model import JobState, now
from vmjobs.wire import Publication

pytestmark = pytest.mark.in_process

DISK = noise(SEGMENT_BYTES + 5 * CHUNK_BYTES)
SECRET = b"the password is wombat"


def put(repository: Repository, owner: str, data: bytes) -> bool:
    return repository.blob_owners.put(owner, digest_of(data), io.BytesIO(data))


def with_input(repository: Repository, owner: str, data: bytes) -> str:
    """Submit a job with this input, given only by its digest."""
    file = {"name": "in", "digest": digest_of(data), "size": len(data)}
    return one(repository, owner, inputs=[file]).id


def test_the_digest_of_anothers_input_is_of_no_use(repository: Repository) -> None:
    assert put(repository, "ada", SECRET)
    with_input(repository, "ada", SECRET)
    assert not repository.blob_owners.has("eve", digest_of(SECRET))
    with pytest.raises(InvalidSpec) as of_anothers:
        with_input(repository, "eve", SECRET)
    with pytest.raises(InvalidSpec) as of_nobodys:
        with_input(repository, "eve", b"what is not here")
    (one_fault,), (other,) = of_anothers.value.faults, of_nobodys.value.faults
    assert one_fault.code == other.code == "missing_blob"
    known, unknown = digest_of(SECRET), digest_of(b"what is not here")
    assert one_fault.message.replace(known, "") == other.message.replace(unknown, "")


@pytest.mark.both_databases
def test_who_sends_the_bytes_has_them(repository: Repository) -> None:
    put(repository, "ada", SECRET)
    assert put(repository, "bob", SECRET)  # reported as new: bob does not learn that it exists
    assert not put(repository, "bob", SECRET)
    job = with_input(repository, "bob", SECRET)
    with repository.jobs.open_input(job, "in", "bob") as reader:
        assert b"".join(reader) == SECRET
    assert len([found for found, _ in repository.blobs.stored() if found == digest_of(SECRET)]) == 1


def test_what_a_job_delivered_may_be_the_next_ones_input(repository: Repository) -> None:
    job = one(repository, "ada", outputs=["*"]).id
    attempt = claim(repository, job)
    bring(repository, job, attempt, JobState.RUNNING)
    repository.attempts.put_output(job, attempt, "found", io.BytesIO(SECRET), len(SECRET))
    sweeper(repository).garbage_collector.collect()
    with_input(repository, "ada", SECRET)
    refused(InvalidSpec, lambda: with_input(repository, "eve", SECRET))


@pytest.mark.both_databases
def test_what_no_job_uses_goes(repository: Repository) -> None:
    put(repository, "ada", SECRET)
    put(repository, "bob", SECRET)
    put(repository, "ada", b"never used")
    repository.garbage_collector.collect()
    assert repository.blob_owners.has("ada", digest_of(b"never used"))
    job = with_input(repository, "ada", SECRET)
    assert sweeper(repository).garbage_collector.collect(dry_run=True).blobs == 1
    report = sweeper(repository).garbage_collector.collect()
    assert (report.blobs, report.bytes) == (1, len(b"never used"))
    assert not repository.blob_owners.has("ada", digest_of(b"never used"))
    assert repository.blobs.size(digest_of(b"never used")) is None
    assert not repository.blob_owners.has("bob", digest_of(SECRET))
    with repository.jobs.open_input(job, "in") as reader:
        assert b"".join(reader) == SECRET
    assert put(repository, "ada", b"never used")


def test_a_blob_that_is_collected_while_it_is_asked_for_is_not_there(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(repository, "ada", SECRET)

    def collected_now() -> datetime:
        with repository.database.write() as session:
            session.execute(delete(BlobOwnerRow))
        return now()

    monkeypatch.setattr("repository.storage.blob_owners.utc_now", collected_now)
    assert not sweeper(repository).blob_owners.has("ada", digest_of(SECRET))


@pytest.mark.both_databases
def test_what_no_job_uses_counts(repository: Repository) -> None:
    tight = sweeper(repository, 3600, image_quota=1)
    put(tight, "ada", noise(MIB - 10))
    refused(QuotaExceeded, lambda: put(tight, "ada", SECRET), match="1 MiB")
    assert tight.blobs.size(digest_of(SECRET)) is None
    put(tight, "bob", SECRET)
    with_input(tight, "ada", noise(MIB - 10))
    put(tight, "ada", SECRET)


def test_a_blob_whose_upload_was_killed_is_sent_again(repository: Repository) -> None:
    repository.blob_owners.add("ada", digest_of(SECRET), len(SECRET), limited=True)
    assert not repository.blob_owners.has("ada", digest_of(SECRET))
    assert put(repository, "ada", SECRET)
    assert repository.blob_owners.has("ada", digest_of(SECRET))


@pytest.mark.both_databases
def test_the_segments_and_blocks_of_a_private_image_are_missing_for_others(
    repository: Repository,
) -> None:
    push(repository, ADA, DISK, name="secret")
    upload = begin(repository, EVE)
    segments = [digest for digest, _ in pieces(DISK)]
    assert repository.uploads.missing_segments(EVE, upload, segments) == [True, True]
    blocks = digest_chunks(memoryview(DISK[:SEGMENT_BYTES]))
    assert all(repository.uploads.missing_chunks(EVE, upload, blocks))
    mine = begin(repository, ADA)
    assert repository.uploads.missing_segments(ADA, mine, segments) == [False, False]
    assert not any(repository.uploads.missing_chunks(ADA, mine, blocks))


def test_an_image_cannot_be_made_of_digests(repository: Repository) -> None:
    """Neither of a content's digest, nor of its segments' or chunks' digests."""
    push(repository, ADA, DISK, name="secret")
    parts, upload = layout(DISK), begin(repository, EVE)
    with pytest.raises(MissingChunks, match="2 of the 2 segments"):
        repository.uploads.put_content(EVE, upload, parts.digest, parts.to_bytes())
    for digest, piece in pieces(DISK):
        count = -(-len(piece) // CHUNK_BYTES)
        with pytest.raises(MissingChunks, match=f"{count} of the {count} blocks"):
            repository.segments.put(EVE, upload, digest, packed(piece, list(range(count))))
    theft = Publication(manifest=manifest_of(parts), upload=upload)
    refused(MissingChunks, lambda: repository.publisher.publish(EVE, theft))
    assert repository.uploads.get(EVE, upload).received == 0


@pytest.mark.both_databases
def test_what_was_shared_need_not_be_sent(repository: Repository) -> None:
    push(repository, ADA, DISK, name="ours", shares=[{"kind": "user", "name": "bob"}])
    changed = bytearray(DISK)
    changed[CHUNK_BYTES : 2 * CHUNK_BYTES] = noise(CHUNK_BYTES, 9)
    (first, _), (second, _) = pieces(bytes(changed))
    upload = begin(repository, BOB)
    assert repository.uploads.missing_segments(BOB, upload, [first, second]) == [True, False]
    blocks = digest_chunks(memoryview(bytes(changed[:SEGMENT_BYTES])))
    assert repository.uploads.missing_chunks(BOB, upload, blocks).count(True) == 1


@pytest.mark.both_databases
def test_blocks_that_others_have_too_are_found_among_ones_own(repository: Repository) -> None:
    """A second push sends only what changed, even if others uploaded its chunks first."""
    push(repository, EVE, DISK, name="hers")
    push(repository, ADA, DISK[:SEGMENT_BYTES], name="mine")
    changed = bytearray(DISK[:SEGMENT_BYTES])
    changed[7 * CHUNK_BYTES : 8 * CHUNK_BYTES] = noise(CHUNK_BYTES, 3)
    ((digest, piece),) = pieces(bytes(changed))
    upload = begin(repository, ADA)
    flags = repository.uploads.missing_chunks(ADA, upload, digest_chunks(memoryview(piece)))
    assert [n for n, missing in enumerate(flags) if missing] == [7]
    body = packed(piece, [n for n, missing in enumerate(flags) if not missing])
    assert repository.segments.put(ADA, upload, digest, body)


def test_a_jobs_token_may_use_its_image_alone(repository: Repository) -> None:
    push(repository, ADA, DISK, name="secret")
    booted = push(repository, ADA, noise(SEGMENT_BYTES, 5), name="booted")
    job = Viewer("ada", image=booted.digest, job="c" * 32)
    upload = begin(repository, job)
    (secret, _), *_ = pieces(DISK)
    ((own, _),) = pieces(noise(SEGMENT_BYTES, 5))
    assert repository.uploads.missing_segments(job, upload, [secret, own]) == [True, False]


def test_images_that_may_be_read(repository: Repository) -> None:
    private = push(repository, ADA, DISK, name="secret").digest
    public = repository.catalog.resolve(EVE, "hep")
    asked = [private, public, "sha256:" + "0" * 64]
    assert repository.catalog.readable(EVE, asked) == {public}
    assert repository.catalog.readable(ADA, asked) == {private, public}
    refused(NotFound, lambda: repository.catalog.detail(EVE, private))
