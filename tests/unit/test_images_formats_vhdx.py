"""Attacks with VHDX, with correct checksums: each is refused for its own reason."""

from __future__ import annotations

import struct
from collections.abc import Callable
from uuid import UUID

import pytest
from formats_kit import KIB64, Lab, le16, le32, le64, refused, seal_vhdx

from images.formats.crc32c import crc32c

MIB = 1024 * 1024
BOTH = ("vhdx-dynamic", "vhdx-fixed")
PARENT = UUID("A8D35F2D-B30B-454D-ABF7-D3D84834AB0C").bytes_le
BAT = UUID("2DC27766-F623-4200-9D64-115E9BFD4A08").bytes_le
METADATA = UUID("8B7CA206-4790-4B9A-B8FE-575F050F886E").bytes_le
PARAMETERS = UUID("CAA16737-FA36-4D43-B3B6-33F0AA44E76B").bytes_le
SIZE_ITEM = UUID("2FA54224-CD1B-4876-B211-5DBED83BF4B8").bytes_le
SECTOR_ITEM = UUID("8141BF1D-A96F-4709-BA47-F233A8FAAB5F").bytes_le


HEADERS, REGIONS = (KIB64, 2 * KIB64), (3 * KIB64, 4 * KIB64)


def in_both(places: tuple[int, int], offset: int, new: bytes) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        for begin in places:
            data[begin + offset : begin + offset + len(new)] = new
        seal_vhdx(data)

    return change


def region(data: bytearray, guid: bytes) -> tuple[int, int]:
    """Return the offsets of the region's entry in its table, and of the region."""
    entry = data.index(guid, 3 * KIB64)
    return entry - 3 * KIB64, struct.unpack_from("<Q", data, entry + 16)[0]


def item(data: bytearray, guid: bytes) -> int:
    """Return the offset of a metadata item's entry."""
    return data.index(guid, region(data, METADATA)[1])


def value_of(data: bytearray, guid: bytes) -> int:
    """Return the offset of a metadata item's value."""
    (offset,) = struct.unpack_from("<I", data, item(data, guid) + 16)
    return region(data, METADATA)[1] + int(offset)


def test_the_checksum_is_the_standards() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("name", BOTH)
def test_parents_are_refused(lab: Lab, name: str) -> None:
    data = lab.data(name)
    refused(lab.patched(name, (value_of(data, PARAMETERS) + 4, le32(2))), "backing_file")
    refused(lab.patched(name, (item(data, PARAMETERS), PARENT)), "backing_file")


def turned(*offsets: int) -> Callable[[bytearray], None]:
    """Flip one bit of each of these bytes; some of the bytes differ in every new file."""

    def change(data: bytearray) -> None:
        for offset in offsets:
            data[offset] ^= 1

    return change


@pytest.mark.parametrize("name", BOTH)
def test_damaged_headers_are_refused(lab: Lab, name: str) -> None:
    refused(lab.changed(name, turned(KIB64 + 20, 2 * KIB64 + 20)), "checksum")
    refused(lab.changed(name, turned(3 * KIB64 + 99, 4 * KIB64 + 99)), "checksum")
    refused(lab.patched(name, (KIB64, b"HEAD"), (2 * KIB64, b"HEAD")), "checksum")


def test_two_headers_or_tables_of_regions_that_differ_are_refused(lab: Lab) -> None:
    """Two readers could see two different disks."""

    def headers(data: bytearray) -> None:
        data[2 * KIB64 : 2 * KIB64 + 4096] = data[KIB64 : KIB64 + 4096]
        data[2 * KIB64 + 72 : 2 * KIB64 + 80] = le64(2 * MIB)
        seal_vhdx(data)

    def regions(data: bytearray) -> None:
        data[4 * KIB64 + 16 + 16 : 4 * KIB64 + 16 + 24] = le64(6 * MIB)
        seal_vhdx(data)

    for differ in (headers, regions):
        refused(lab.changed("vhdx-dynamic", differ), "ambiguous")


@pytest.mark.parametrize("name", BOTH)
def test_headers_that_cannot_be_are_refused(lab: Lab, name: str) -> None:
    for offset, value, code in (
        (48, bytes(range(16)), "not_closed"),  # a log with pending writes
        (66, le16(2), "unknown_version"),
        (64, le16(1), "unknown_version"),
        (68, le32(513), "misaligned"),
        (72, le64(513), "misaligned"),
        (72, le64(0), "overlap"),
        (72, le64(1 << 60), "outside_file"),
    ):
        refused(lab.changed(name, in_both(HEADERS, offset, value)), code)


@pytest.mark.parametrize("name", BOTH)
def test_regions_that_cannot_be_are_refused(lab: Lab, name: str) -> None:
    data = lab.data(name)
    bat, place = region(data, BAT)
    metadata, other = region(data, METADATA)
    for offset, value, code in (
        (8, le32(0), "regions"),
        (8, le32(0xFFFFFFFF), "regions"),
        (bat + 16, le64(513), "misaligned"),
        (bat + 16, le64(0), "misaligned"),
        (bat + 16, le64(1 << 60), "outside_file"),
        (bat + 16, le64(other), "overlap"),
        (metadata + 16, le64(place), "overlap"),
        (bat + 24, le32(0), "misaligned"),
        (bat, bytes(range(16)) + le64(place) + le32(MIB) + le32(0), "regions"),
        (bat, bytes(range(16)) + le64(place) + le32(MIB) + le32(1), "unknown_features"),
        (bat, METADATA, "ambiguous"),
    ):
        refused(lab.changed(name, in_both(REGIONS, offset, value)), code)


@pytest.mark.parametrize("name", BOTH)
def test_metadata_that_cannot_be_is_refused(lab: Lab, name: str) -> None:
    data = lab.data(name)
    table = region(data, METADATA)[1]
    size, block = value_of(data, SIZE_ITEM), value_of(data, PARAMETERS)
    sector = value_of(data, SECTOR_ITEM)
    for offset, value, code in (
        (table, b"METADATA", "metadata"),
        (table + 10, b"\xff\xff", "metadata"),
        (table + 10, b"\0\0", "metadata"),
        (item(data, SIZE_ITEM), bytes(range(16)), "unknown_features"),
        (item(data, SIZE_ITEM), PARAMETERS, "ambiguous"),
        (item(data, SIZE_ITEM) + 16, le32(16), "metadata"),
        (item(data, SIZE_ITEM) + 16, le32(0xFFFFFFFF), "metadata"),
        (item(data, SIZE_ITEM) + 20, le32(4), "metadata"),
        (size, le64(0), "no_size"),
        (size, le64(513), "odd_size"),
        (size, le64(1 << 62), "disk_too_large"),
        (size, le64(1 << 45), "block_count"),
        (block, le32(0), "block_size"),
        (block, le32(512), "block_size"),
        (block, le32(3 * MIB), "block_size"),
        (block, le32(1 << 31), "block_size"),
        (sector, le32(0), "sector_size"),
        (sector, le32(513), "sector_size"),
    ):
        refused(lab.patched(name, (offset, value)), code)


@pytest.mark.parametrize("name", BOTH)
def test_tables_of_blocks_that_lie_are_refused(lab: Lab, name: str) -> None:
    data = lab.data(name)
    table, metadata = region(data, BAT)[1], region(data, METADATA)[1]
    for entry, code in (
        (6 | 1 << 50, "outside_file"),
        (6, "overlap"),
        (6 | table, "overlap"),
        (6 | metadata, "overlap"),
        (6 | 1 << 10, "reserved_bits"),
        (4, "reserved_bits"),
        (5, "reserved_bits"),
        (7 | table, "backing_file"),
    ):
        refused(lab.patched(name, (table, le64(entry))), code)


def test_blocks_that_are_shared_are_refused(lab: Lab) -> None:
    data = lab.data("vhdx-dynamic")
    table = region(data, BAT)[1]
    places = [table + 8 * n for n in range(8) if data[table + 8 * n] & 7 == 6]
    shared = bytes(data[places[1] : places[1] + 8])
    refused(lab.patched("vhdx-dynamic", (places[0], shared)), "overlap")
