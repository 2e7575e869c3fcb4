"""What garbage collection deletes and what it keeps, also under load."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import timedelta

import pytest
from sqlalchemy import func, select

from images.content import CHUNK_BYTES, ContentLayout
from images.manifest import sha256_digest
from repository.db.models import Base
from repository.images import Viewer, tables
from repository.images.tables import (
    ContentRow,
    ContentSegmentRow,
    ImageContentRow,
    ImageRow,
    SegmentRow,
    UploadRow,
)
from repository.images.usage import is_needed
from repository.service import Repository
from tests.kit import ROOT
from tests.kit.noise import noise
from tests.kit.repository_images import ADA, BOB, packed, pieces, read, stored, sweeper
from tests.kit.repository_images_load import DISKS, disk, load, manifest
from tests.kit.repository_jobs import ADMIN, images_of, push, send, statements
from vmjobs.config import Config
from vmjobs.errors import NotFound
from vmjobs.model import now
from vmjobs.wire import GcReport

pytestmark = pytest.mark.in_process

#: Random operations in the load test, all kinds together.
STEPS = 300
#: Every table of the image repository.
ROWS = [
    table
    for table in vars(tables).values()
    if isinstance(table, type) and issubclass(table, Base) and table is not Base
]


@pytest.fixture
def images(repository: Repository) -> Repository:
    """An image repository without images, on either database."""
    repository.catalog.remove(ADMIN, repository.catalog.resolve(ADMIN, "hep"))
    sweeper(repository).garbage_collector.collect()
    assert rows(repository) == {}
    return repository


def rows(images: Repository) -> dict[str, int]:
    """Return the number of rows by table, without empty tables."""
    with images.database.read() as session:
        counts = {
            table.__tablename__: session.scalar(select(func.count()).select_from(table)) or 0
            for table in ROWS
        }
    return {name: count for name, count in counts.items() if count}


def check_whole(images: Repository) -> None:
    """Check that all stored data is complete and needed."""
    with images.database.read() as session:
        named = set(session.scalars(select(SegmentRow.object)))
        assert named == set(stored(images))
        assert not session.scalars(select(UploadRow.id)).all()
        used = set(session.scalars(select(ContentSegmentRow.segment)))
        assert used == set(session.scalars(select(SegmentRow.id)))
        contents = set(session.scalars(select(ImageContentRow.content)))
        assert contents == set(session.scalars(select(ContentRow.id)))
        held = set(session.scalars(select(tables.HoldingRow.image)))
        needy = set(session.scalars(select(ImageRow.digest).where(is_needed())))
        assert held | needy == set(session.scalars(select(ImageRow.digest)))


@pytest.mark.both_databases
def test_what_nobody_needs_goes(images: Repository) -> None:
    push(images, ADA, noise(3 * CHUNK_BYTES), name="kept")
    push(images, ADA, noise(3 * CHUNK_BYTES) + noise(CHUNK_BYTES, 1), b"kernel", name="gone")
    images.catalog.remove(ADA, images.catalog.resolve(ADA, "gone"))
    upload = images.uploads.begin(BOB, 10 * CHUNK_BYTES).id
    send(images, BOB, upload, noise(CHUNK_BYTES, 2))
    assert images.garbage_collector.collect() == GcReport()  # all of it is too recent
    before = rows(images)
    dry = sweeper(images).garbage_collector.collect(dry_run=True)
    assert rows(images) == before
    assert len(stored(images)) == 4
    done = sweeper(images).garbage_collector.collect()
    assert done == dry
    assert (done.images, done.contents, done.segments, done.uploads) == (0, 3, 3, 1)
    assert done.bytes > 2 * CHUNK_BYTES
    assert sweeper(images).garbage_collector.collect() == GcReport()
    check_whole(images)
    with pytest.raises(NotFound):
        images.uploads.get(BOB, upload)


@pytest.mark.both_databases
def test_a_dry_run_neither_waits_for_writers_nor_writes(images: Repository) -> None:
    push(images, ADA, noise(3 * CHUNK_BYTES), b"kernel", name="kept")
    push(images, ADA, noise(3 * CHUNK_BYTES) + noise(CHUNK_BYTES, 1), b"kernel", name="gone")
    push(images, BOB, noise(3 * CHUNK_BYTES, 2), name="also", keep_days=1)
    images.catalog.remove(ADA, images.catalog.resolve(ADA, "gone"))
    upload = images.uploads.begin(BOB, 10 * CHUNK_BYTES).id
    send(images, BOB, upload, noise(CHUNK_BYTES, 3))
    with images.database.write() as session:
        for holding in session.scalars(
            select(tables.HoldingRow).where(tables.HoldingRow.owner == "bob")
        ):
            holding.expires = now() - timedelta(hours=1)
    before = rows(images)
    # All rows are locked; what waited for them would fail after BUSY_SECONDS.
    with images.database.write() as session:
        for table in (ContentRow, SegmentRow, ImageRow, UploadRow):
            session.scalars(select(table).with_for_update()).all()
        with statements(images.database) as asked:
            dry = sweeper(images).garbage_collector.collect(dry_run=True)
    assert all(statement.startswith("SELECT") for statement, _ in asked)
    assert rows(images) == before
    assert (dry.images, dry.uploads) == (1, 1)
    assert sweeper(images).garbage_collector.collect() == dry
    check_whole(images)


@pytest.mark.both_databases
def test_a_running_upload_keeps_what_it_was_told_of(images: Repository) -> None:
    push(images, ADA, noise(3 * CHUNK_BYTES), name="old", visibility="public")
    ((digest, piece),) = pieces(noise(3 * CHUNK_BYTES))
    upload = images.uploads.begin(BOB, 10 * CHUNK_BYTES).id
    assert images.uploads.missing_segments(BOB, upload, [digest]) == [False]
    images.catalog.remove(ADA, images.catalog.resolve(ADA, "old"))
    busy = sweeper(images, patience=0.0)
    with images.database.write() as session:
        session.get_one(UploadRow, upload).touched = images.uploads.get(BOB, upload).expires
    assert busy.garbage_collector.collect().contents == 1
    assert images.uploads.missing_segments(BOB, upload, [digest]) == [False]
    images.uploads.drop(BOB, upload)
    assert busy.garbage_collector.collect().segments == 1
    fresh = images.uploads.begin(BOB, 10 * CHUNK_BYTES).id
    assert images.uploads.missing_segments(BOB, fresh, [digest]) == [True]
    assert images.segments.put(BOB, fresh, digest, packed(piece))


@pytest.mark.both_databases
def test_objects_that_no_row_names(images: Repository) -> None:
    push(images, ADA, noise(10), name="kept")
    strange = ["segments/strange", "segments/00/00/" + "0" * 64 + ".0000000000000000"]
    for key in strange:
        images.objects.put_bytes(key, b"left behind")
    images.objects.put_bytes("others/00", b"no affair of ours")
    assert images.garbage_collector.collect() == GcReport()
    done = sweeper(images).garbage_collector.collect()
    assert (done.segments, done.bytes) == (2, 22)
    assert images.objects.size("others/00") is not None
    check_whole(images)


KILLED = """
import sys
from tests.kit.noise import noise
from tests.kit.repository_images import ADA, pieces, packed
from repository.service import open_repository
from vmjobs.config import Config

config = Config(data_dir=sys.argv[1], database_url=sys.argv[2])
images = open_repository(config, migrate=False)
upload = images.uploads.begin(ADA, 10**9).id
place = sys.argv[3]
if place == "between":
    images.database.write = lambda: (print("here", flush=True), sys.stdin.read())
((digest, piece),) = pieces(noise(100_000))
images.segments.put(ADA, upload, digest, packed(piece))
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize("place", ["between", "after"])
def test_a_killed_upload_leaves_no_row_without_object(images: Repository, place: str) -> None:
    config = images.config
    command = [sys.executable, "-c", KILLED, str(config.data_dir), config.database_url, place]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)}, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGKILL)
    assert len(stored(images)) == 1
    assert rows(images).get("segments", 0) == (1 if place == "after" else 0)
    ((digest, _),) = pieces(noise(100_000))
    upload = images.uploads.begin(ADA, 10**6).id
    assert images.uploads.missing_segments(ADA, upload, [digest]) == [place == "between"]
    parts = send(images, ADA, upload, noise(100_000))
    assert parts.segments == (digest,)
    done = push(images, ADA, noise(100_000))
    sweeper(images).garbage_collector.collect()
    assert read(images, ADA, done) == noise(100_000)
    check_whole(images)


@pytest.mark.both_databases
@pytest.mark.soak_for("sqlite")
def test_under_load(config: Config, images: Repository, repository: Repository) -> None:
    """Collection never deletes what an image, job or upload needs, and keeps nothing else."""
    done = load(config, STEPS)
    for what in ("push", "give_up", "remove", "rename", "run", "end", "collected segments"):
        assert done[what] > 0, f"nothing was done of: {what}"
    sweeper(images).garbage_collector.collect()
    disks = {manifest(seed).digest: disk(seed) for seed in range(DISKS)}
    with images.database.read() as session:
        left = list(session.scalars(select(ImageRow.digest)))
        assert {image.digest for image in images_of(images, ADMIN)} <= set(left)
    for digest in left:
        viewer = Viewer("x", image=digest)
        root = images.catalog.parsed_manifest(viewer, digest).root.digest
        parts = ContentLayout.parse(images.contents.layout(viewer, digest, root), root)
        assert b"".join(images.contents.read(parts)) == disks[digest]
        assert sha256_digest(images.catalog.manifest(viewer, digest)) == digest
        report = images.contents.verify(viewer, digest, [name for _, name in parts.stored()])
        assert (report.damaged, report.missing) == ((), ())
    check_whole(images)
    for job in repository.jobs.page(None, limit=2000).jobs:
        if not job.state.final:
            assert job.image_digest in left
            repository.job_actions.cancel(job.id)
    for digest in left:
        try:
            images.catalog.remove(ADMIN, digest)
        except NotFound:
            continue  # only a job keeps it
    sweeper(images).garbage_collector.collect()
    assert rows(images) == {}
    assert stored(images) == []
