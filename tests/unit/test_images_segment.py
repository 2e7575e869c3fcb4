"""Segments as they are stored and sent: what comes back, and what is refused."""

from __future__ import annotations

import random
import struct
import tracemalloc

import pytest
import zstandard

from images.content import BLOCK, SEGMENT, block_digest, layout_of_bytes
from images.segment import (
    MAX_STORED,
    Index,
    Kind,
    assemble,
    head_size,
    pack,
    parse_index,
    read_block,
    unpack,
)
from vmjobs.errors import DigestMismatch

RANDOM = random.Random(1).randbytes(BLOCK)
TEXT = (b"minimum bias " * BLOCK)[:BLOCK]


def digest(data: bytes) -> bytes:
    return layout_of_bytes(data).segments[0]


@pytest.mark.parametrize(
    "data", [b"x", RANDOM, TEXT, TEXT + RANDOM[:7], bytes(BLOCK) + TEXT, bytes(BLOCK + 3), RANDOM * 128]
)
def test_what_was_packed_comes_back(data: bytes) -> None:
    stored = pack(data)
    assert len(stored) <= MAX_STORED
    assert unpack(stored, digest(data)) == data


def test_each_block_is_kept_in_the_shortest_way() -> None:
    data = bytes(BLOCK) + RANDOM + TEXT
    stored = pack(data)
    index = parse_index(stored, whole=len(stored))
    assert [entry.kind for entry in index.entries] == [Kind.ZEROS, Kind.PLAIN, Kind.ZSTD]
    assert len(stored) < head_size(3) + BLOCK + 2000


def test_a_single_block_can_be_read_from_its_place() -> None:
    stored = pack(RANDOM + TEXT)
    entry = parse_index(stored[: head_size(2)], whole=len(stored)).entries[1]
    assert read_block(entry, stored[entry.offset : entry.offset + entry.length]) == TEXT


def test_blocks_can_be_left_out_and_filled_in_from_elsewhere() -> None:
    data = TEXT + RANDOM
    sent = pack(data, absent={0})
    index = parse_index(sent, whole=len(sent))
    assert index.absent == [0]
    assert index.digest == digest(data)
    with pytest.raises(DigestMismatch, match="is missing from the segment"):
        unpack(sent, digest(data))
    had = pack(TEXT)
    source = parse_index(had, whole=len(had)).entries[0]
    second = index.entries[1]
    whole = assemble(
        index,
        [
            (source.kind, had[source.offset : source.offset + source.length]),
            (second.kind, sent[second.offset : second.offset + second.length]),
        ],
    )
    assert whole == pack(data)


@pytest.mark.parametrize("at", [0, 8, 11, 12, 15, 16, 40, 48, 52, head_size(2), head_size(2) + 9, -1])
def test_a_flipped_bit_anywhere_is_noticed(at: int) -> None:
    stored = bytearray(pack(TEXT + RANDOM))
    stored[at] ^= 1
    with pytest.raises(DigestMismatch):
        unpack(bytes(stored), digest(TEXT + RANDOM))


def test_a_cut_off_segment_and_another_one_are_noticed() -> None:
    for size in (0, 7, 15, 16, 50, 100, 500):
        with pytest.raises(DigestMismatch):
            unpack(pack(TEXT + RANDOM)[:size], digest(TEXT + RANDOM))
    with pytest.raises(DigestMismatch, match="expected"):
        unpack(pack(TEXT), digest(RANDOM))


def bomb(body: bytes, size: int = BLOCK) -> bytes:
    entry = struct.pack(">32sI", block_digest(bytes(size)), Kind.ZSTD << 30 | len(body))
    return struct.pack(">8sII", b"VMJSEG1\n", 1, size) + entry + body


@pytest.mark.parametrize(
    "frame",
    [
        zstandard.ZstdCompressor(level=1).compress(bytes(1 << 30)),
        zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(1 << 26)),
        zstandard.ZstdCompressor(level=1).compress(bytes(BLOCK)) * 2,
    ],
    ids=["says 1 GiB", "says nothing", "two frames"],
)
def test_a_bomb_takes_no_memory(frame: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(DigestMismatch):
        unpack(bomb(frame), digest(bytes(BLOCK)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * SEGMENT


def test_zeros_cannot_be_claimed_for_something_else() -> None:
    entry = struct.pack(">32sI", block_digest(TEXT), Kind.ZEROS << 30)
    stored = struct.pack(">8sII", b"VMJSEG1\n", 1, BLOCK) + entry
    with pytest.raises(DigestMismatch, match="cannot be 0 bytes"):
        parse_index(stored, whole=len(stored))


@pytest.mark.parametrize(("count", "size"), [(0, 0), (129, SEGMENT + 1), (1, BLOCK + 1), (2, BLOCK)])
def test_counts_and_sizes_must_agree(count: int, size: int) -> None:
    stored = struct.pack(">8sII", b"VMJSEG1\n", count, size) + bytes(36 * count)
    with pytest.raises(DigestMismatch, match="cannot have"):
        parse_index(stored, whole=len(stored))


def test_noise_never_gets_further_than_a_refusal() -> None:
    noise = random.Random(7)
    good = pack(TEXT + bytes(BLOCK) + RANDOM)
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(noise.randint(1, 4)):
            bad[noise.randrange(head_size(3) + 64)] = noise.randrange(256)
        try:
            index = parse_index(bytes(bad), whole=len(bad))
        except DigestMismatch:
            continue
        assert isinstance(index, Index)
