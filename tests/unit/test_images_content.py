"""Contents and their segments: digests, how they are stored and sent, and what is refused."""

from __future__ import annotations

import hashlib
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from images.content import (
    CHUNK_BYTES,
    MAX_CONTENT_BYTES,
    SEGMENT_BYTES,
    ContentLayout,
    chunk_digest,
    compute_layout,
    iter_segments,
    zero_segment_digest,
)
from images.segment import (
    MAX_STORED_BYTES,
    ChunkEncoding,
    SegmentHeader,
    build_segment,
    decode_segment,
    header_size,
    parse_header,
)
from tests.kit.segments import compute_layout_of_bytes, encode_segment
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


RANDOM = random.Random(1).randbytes(CHUNK_BYTES)
TEXT = (b"minimum bias " * CHUNK_BYTES)[:CHUNK_BYTES]


def digest(data: bytes) -> bytes:
    return compute_layout_of_bytes(data).segments[0]


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        RANDOM,
        TEXT,
        TEXT + RANDOM[:7],
        bytes(CHUNK_BYTES) + TEXT,
        bytes(CHUNK_BYTES + 3),
        RANDOM * 128,
    ],
)
def test_what_was_packed_comes_back(data: bytes) -> None:
    stored = encode_segment(data)
    assert len(stored) <= MAX_STORED_BYTES
    assert decode_segment(stored, digest(data)) == data


def test_each_block_is_kept_in_the_shortest_way() -> None:
    data = bytes(CHUNK_BYTES) + RANDOM + TEXT
    stored = encode_segment(data)
    index = parse_header(stored, whole=len(stored))
    assert [entry.kind for entry in index.entries] == [
        ChunkEncoding.ZEROS,
        ChunkEncoding.PLAIN,
        ChunkEncoding.ZSTD,
    ]
    assert len(stored) < header_size(3) + CHUNK_BYTES + 2000


def test_blocks_can_be_left_out_and_filled_in_from_elsewhere() -> None:
    data = TEXT + RANDOM
    sent = encode_segment(data, absent={0})
    index = parse_header(sent, whole=len(sent))
    assert index.absent == [0]
    assert index.digest == digest(data)
    with pytest.raises(DigestMismatch, match="is missing from the segment"):
        decode_segment(sent, digest(data))
    had = encode_segment(TEXT)
    source = parse_header(had, whole=len(had)).entries[0]
    second = index.entries[1]
    whole = build_segment(
        index,
        [
            (source.kind, had[source.offset : source.offset + source.length]),
            (second.kind, sent[second.offset : second.offset + second.length]),
        ],
    )
    assert whole == encode_segment(data)


@pytest.mark.parametrize(
    "at", [0, 8, 11, 12, 15, 16, 40, 48, 52, header_size(2), header_size(2) + 9, -1]
)
def test_a_flipped_bit_anywhere_is_noticed(at: int) -> None:
    stored = bytearray(encode_segment(TEXT + RANDOM))
    stored[at] ^= 1
    with pytest.raises(DigestMismatch):
        decode_segment(bytes(stored), digest(TEXT + RANDOM))


def test_a_cut_off_segment_and_another_one_are_noticed() -> None:
    for size in (0, 7, 15, 16, 50, 100, 500):
        with pytest.raises(DigestMismatch):
            decode_segment(encode_segment(TEXT + RANDOM)[:size], digest(TEXT + RANDOM))
    with pytest.raises(DigestMismatch, match="expected"):
        decode_segment(encode_segment(TEXT), digest(RANDOM))


def bomb(body: bytes, size: int = CHUNK_BYTES) -> bytes:
    entry = struct.pack(">32sI", chunk_digest(bytes(size)), ChunkEncoding.ZSTD << 30 | len(body))
    return struct.pack(">8sII", b"VMJSEG1\n", 1, size) + entry + body


@pytest.mark.parametrize(
    "frame",
    [
        zstandard.ZstdCompressor(level=1).compress(bytes(1 << 30)),
        zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(1 << 26)),
        zstandard.ZstdCompressor(level=1).compress(bytes(CHUNK_BYTES)) * 2,
    ],
    ids=["says 1 GiB", "says nothing", "two frames"],
)
def test_a_bomb_takes_no_memory(frame: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(DigestMismatch):
        decode_segment(bomb(frame), digest(bytes(CHUNK_BYTES)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * SEGMENT_BYTES


def test_zeros_cannot_be_claimed_for_something_else() -> None:
    entry = struct.pack(">32sI", chunk_digest(TEXT), ChunkEncoding.ZEROS << 30)
    stored = struct.pack(">8sII", b"VMJSEG1\n", 1, CHUNK_BYTES) + entry
    with pytest.raises(DigestMismatch, match="cannot be 0 bytes"):
        parse_header(stored, whole=len(stored))


@pytest.mark.parametrize(
    ("count", "size"), [(0, 0), (129, SEGMENT_BYTES + 1), (1, CHUNK_BYTES + 1), (2, CHUNK_BYTES)]
)
def test_counts_and_sizes_must_agree(count: int, size: int) -> None:
    stored = struct.pack(">8sII", b"VMJSEG1\n", count, size) + bytes(36 * count)
    with pytest.raises(DigestMismatch, match="cannot have"):
        parse_header(stored, whole=len(stored))


def test_noise_never_gets_further_than_a_refusal() -> None:
    noise = random.Random(7)
    good = encode_segment(TEXT + bytes(CHUNK_BYTES) + RANDOM)
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(noise.randint(1, 4)):
            bad[noise.randrange(header_size(3) + 64)] = noise.randrange(256)
        try:
            index = parse_header(bytes(bad), whole=len(bad))
        except DigestMismatch:
            continue
        assert isinstance(index, SegmentHeader)
