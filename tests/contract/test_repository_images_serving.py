"""Serving segments: one query for several, and how long its answer is cached."""

from __future__ import annotations

import pytest

from images.content import SEGMENT_BYTES
from images.segment import decode_segment
from repository.images import Viewer
from repository.images.serving import CACHE_SECONDS
from repository.service import Repository
from tests.kit.noise import noise
from tests.kit.repository_images import ADA, BOB, EVE, packed, pieces, stored, sweeper
from tests.kit.repository_jobs import push, refused, statements
from tests.kit.waiting import Clock
from vmjobs.errors import NotFound
from vmjobs.wire import ImageChange, ImageDetail, Share, Visibility

pytestmark = pytest.mark.in_process

NODE = Viewer("node1", node=True)
#: Three segments, few of whose bytes differ.
DISK = b"".join(noise(1000, n) + bytes(SEGMENT_BYTES - 1000) for n in range(3))
SEGMENTS = [digest for digest, _ in pieces(DISK)]
BOB_TOO = [{"kind": "user", "name": "bob"}]


def served(
    images: Repository, viewer: Viewer, done: ImageDetail, number: int = 0
) -> tuple[bytes, Visibility]:
    """Return a segment's bytes and the image's visibility."""
    reader, seen_by = images.segment_server.open(viewer, done.digest, SEGMENTS[number])
    with reader:
        return decode_segment(reader.read(), SEGMENTS[number]), seen_by


@pytest.mark.both_databases
def test_segments_are_what_they_were_and_asked_for_once(images: Repository) -> None:
    done = push(images, ADA, DISK, name="hep")
    for viewer in (ADA, NODE, Viewer("any", image=done.digest)):
        with statements(images.database) as asked:
            for number, (_, piece) in enumerate(pieces(DISK)):
                assert served(images, viewer, done, number) == (piece, Visibility.PRIVATE)
            assert served(images, viewer, done, 1)[0] == pieces(DISK)[1][1]
        assert len(asked) == 1, "those that follow come with the first"


def test_so_many_come_with_the_first_and_no_more(
    images: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("repository.images.serving.LOOKAHEAD", 2)
    data = b"".join(noise(16, n) + bytes(SEGMENT_BYTES - 16) for n in range(4))
    done = push(images, ADA, data, name="hep")
    digests = [digest for digest, _ in pieces(data)]
    reader = Viewer("another", image=done.digest)  # a new viewer: answers are cached
    with statements(images.database) as asked:
        for digest in digests:
            images.segment_server.open(reader, done.digest, digest)[0].close()
    assert len(asked) == 2


def test_a_share_that_is_taken_back_ends_after_some_seconds(images: Repository, clock: Clock) -> None:
    done = push(images, ADA, DISK, name="hep", shares=BOB_TOO)
    served(images, BOB, done)
    images.catalog.change(ADA, done.digest, ImageChange(shares=()))
    clock.now += CACHE_SECONDS - 0.01
    served(images, BOB, done)
    clock.now += 0.01  # reading does not prolong it
    refused(NotFound, lambda: served(images, BOB, done))
    served(images, ADA, done)


def test_nobody_lets_in_another(images: Repository) -> None:
    done = push(images, ADA, DISK, name="hep", shares=[{"kind": "group", "name": "/atlas"}])
    own = push(images, EVE, noise(10), name="own")
    member = Viewer("eve", frozenset({"/atlas"}))
    for viewer in (ADA, NODE, member, Viewer("any", image=done.digest)):
        served(images, viewer, done)
    images.segment_server.open(EVE, own.digest, pieces(noise(10))[0][0])[0].close()
    for viewer in (EVE, Viewer("node1"), Viewer("any"), Viewer("any", image=own.digest)):
        refused(NotFound, lambda viewer=viewer: served(images, viewer, done))
    # Access to one image gives none to the segments of another.
    refused(NotFound, lambda: served(images, EVE, own))


def test_a_refusal_is_not_remembered(images: Repository) -> None:
    done = push(images, ADA, DISK, name="hep")
    refused(NotFound, lambda: served(images, BOB, done))
    images.catalog.change(ADA, done.digest, ImageChange(shares=(Share(kind="user", name="bob"),)))
    served(images, BOB, done)


def test_what_is_collected_is_gone_at_once(images: Repository) -> None:
    done = push(images, ADA, DISK, name="hep")
    served(images, NODE, done)
    images.catalog.remove(ADA, done.digest)
    sweeper(images).garbage_collector.collect()
    assert stored(images) == []
    refused(NotFound, lambda: served(images, NODE, done))


def test_a_segment_that_is_replaced_is_served_anew(images: Repository) -> None:
    done = push(images, ADA, DISK, name="hep")
    served(images, NODE, done)
    (first, piece), *_ = pieces(DISK)
    for key in stored(images):
        if first.hex() in key:
            images.objects.delete(key)
    images.contents.verify(ADA, done.digest, [first])  # records that it is missing
    upload = images.uploads.begin(ADA, 1 << 30).id
    assert images.uploads.missing_segments(ADA, upload, [first]) == [True]
    assert images.segments.put(ADA, upload, first, packed(piece))
    assert served(images, NODE, done)[0] == piece
