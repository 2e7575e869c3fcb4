"""Contents: the digest tree, and how files are read into it."""

from __future__ import annotations

import hashlib
import random
import struct
from pathlib import Path

import pytest

from images.content import (
    CHUNK_BYTES,
    MAX_CONTENT_BYTES,
    SEGMENT_BYTES,
    ContentLayout,
    compute_layout,
    iter_segments,
    zero_segment_digest,
)
from tests.kit.segments import compute_layout_of_bytes
from vmjobs.errors import DigestMismatch


def by_the_book(data: bytes) -> str:
    """Return the digest that docs/images.md defines, by a second implementation."""
    segments = b""
    for start in range(0, len(data), 8 * 1024 * 1024):
        segment = data[start : start + 8 * 1024 * 1024]
        blocks = (segment[i : i + 65536] for i in range(0, len(segment), 65536))
        digests = b"".join(hashlib.sha256(block).digest() for block in blocks)
        segments += hashlib.sha256(b"vmjobs-segment-1\0" + digests).digest()
    head = b"vmjobs-content-1\0" + struct.pack(">Q", len(data))
    return "tree:" + hashlib.sha256(head + segments).hexdigest()


SIZES = [
    1,
    CHUNK_BYTES - 1,
    CHUNK_BYTES,
    CHUNK_BYTES + 1,
    SEGMENT_BYTES,
    SEGMENT_BYTES + 1,
    2 * SEGMENT_BYTES + 3 * CHUNK_BYTES + 7,
]


@pytest.mark.parametrize("size", SIZES)
def test_the_digest_is_the_documented_one(path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    path.write_bytes(data)
    with path.open("rb", buffering=0) as file:
        layout = compute_layout(file, size)
    assert layout.digest == by_the_book(data)
    assert layout == compute_layout_of_bytes(data)


@pytest.mark.parametrize("size", SIZES)
def test_a_hole_is_as_good_as_zeros(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)
    with path.open("rb", buffering=0) as file:
        layout = compute_layout(file, size)
    assert layout.digest == by_the_book(bytes(size))
    assert list(layout.stored()) == []


def test_a_hole_is_not_even_read(path: Path) -> None:
    with path.open("wb") as file:
        file.seek(3 * SEGMENT_BYTES + 5)
        file.write(b"data")
    with path.open("rb", buffering=0) as file:
        found = dict(iter_segments(file, 3 * SEGMENT_BYTES + 9))
    assert [number for number, blocks in found.items() if blocks is not None] == [3]


def test_only_what_is_not_zero_is_stored() -> None:
    layout = compute_layout_of_bytes(
        bytes(SEGMENT_BYTES) + b"x" * 10 + bytes(SEGMENT_BYTES - 10) + bytes(5)
    )
    assert [number for number, _ in layout.stored()] == [1]
    assert layout.segments[0] == zero_segment_digest()
    assert layout.segments[2] == zero_segment_digest(5)


def test_a_layout_is_read_back_and_pinned_by_its_digest() -> None:
    layout = compute_layout_of_bytes(b"x" * (SEGMENT_BYTES + 1))
    data = layout.to_bytes()
    assert ContentLayout.parse(data, layout.digest) == layout
    with pytest.raises(DigestMismatch, match="damaged"):
        ContentLayout.parse(data[:-1] + bytes([data[-1] ^ 1]), layout.digest)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"vmjobs-content-1\0",
        b"vmjobs-content-1\0" + struct.pack(">Q", SEGMENT_BYTES) + bytes(31),
        b"vmjobs-content-1\0" + struct.pack(">Q", SEGMENT_BYTES) + bytes(64),
        b"vmjobs-content-1\0" + struct.pack(">Q", MAX_CONTENT_BYTES + 1) + bytes(32),
        b"vmjobs-content-2\0" + struct.pack(">Q", 1) + bytes(32),
    ],
)
def test_what_is_no_layout_is_refused_even_by_its_own_digest(data: bytes) -> None:
    with pytest.raises(DigestMismatch, match="not the layout"):
        ContentLayout.parse(data, "tree:" + hashlib.sha256(data).hexdigest())


def test_a_file_that_is_shorter_than_said_is_an_error(path: Path) -> None:
    path.write_bytes(b"x" * 100)
    with path.open("rb", buffering=0) as file, pytest.raises(OSError, match="shorter"):
        compute_layout(file, 200)
