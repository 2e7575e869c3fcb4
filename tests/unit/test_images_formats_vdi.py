"""Attacks with VDI: each is refused for its own reason."""

from __future__ import annotations

import struct

import pytest
from formats_kit import Lab, le32, le64, refused

BOTH = ("vdi-dynamic", "vdi-static")
UUID = bytes(range(16))


@pytest.mark.parametrize("name", BOTH)
def test_headers_that_cannot_be_are_refused(lab: Lab, name: str) -> None:
    for offset, value, code in (
        (0x1A8, UUID, "backing_file"),
        (0x1B8, UUID, "backing_file"),
        (0x4C, le32(3), "backing_file"),
        (0x4C, le32(4), "backing_file"),
        (0x44, le32(0x00000001), "unknown_version"),
        (0x44, le32(0x00020001), "unknown_version"),
        (0x4C, le32(0), "vdi_type"),
        (0x4C, le32(77), "vdi_type"),
        (0x154, le32(513), "misaligned"),
        (0x158, le32(513), "misaligned"),
        (0x154, le32(0xFFFFFE00), "outside_file"),
        (0x158, le32(0xFFFFFE00), "outside_file"),
        (0x154, le32(0), "overlap"),
        (0x158, le32(0), "overlap"),
        (0x168, le32(4096), "sector_size"),
        (0x170, le64(0), "no_size"),
        (0x170, le64(513), "odd_size"),
        (0x170, le64(1 << 60), "disk_too_large"),
        (0x170, le64(1 << 40), "block_count"),
        (0x178, le32(0), "block_size"),
        (0x178, le32(512), "block_size"),
        (0x17C, le32(512), "block_size"),
        (0x180, le32(0), "block_count"),
        (0x180, le32(0xFFFFFFFF), "block_count"),
        (0x184, le32(0xFFFFFFFF), "block_count"),
    ):
        refused(lab.patched(name, (offset, value)), code)


def test_more_blocks_than_the_file_has_are_refused(lab: Lab) -> None:
    refused(lab.patched("vdi-dynamic", (0x184, le32(8))), "outside_file")


@pytest.mark.parametrize("name", BOTH)
def test_block_maps_that_lie_are_refused(lab: Lab, name: str) -> None:
    data = lab.data(name)
    (place,) = struct.unpack_from("<I", data, 0x154)
    refused(lab.patched(name, (place, le32(0xFFFFFFF0))), "outside_file")
    used = [n for n in range(8) if data[place + 4 * n : place + 4 * n + 4] != b"\xff" * 4]
    assert len(used) >= 2
    shared = bytes(data[place + 4 * used[1] : place + 4 * used[1] + 4])
    refused(lab.patched(name, (place + 4 * used[0], shared)), "overlap")


def test_a_fixed_disk_with_holes_is_refused(lab: Lab) -> None:
    (place,) = struct.unpack_from("<I", lab.data("vdi-static"), 0x154)
    refused(lab.patched("vdi-static", (place, b"\xff" * 4)), "block_count")
