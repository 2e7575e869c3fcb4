"""Attacks with qcow2, VDI and VHDX: each is refused for its own reason."""

from __future__ import annotations

import contextlib
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from images.formats import ImageLimits
from images.formats.vhdx import crc32c
from images.inspect.inspection import inspect_image
from tests.kit.disk_formats import (
    HUGE32,
    KIB64,
    Attack,
    Attacks,
    Lab,
    each,
    le16,
    le32,
    le64,
    of_each,
    qemu_img,
    refused,
)
from vmjobs.model import MIB

UUID_BYTES = bytes(range(16))


def be32(value: int) -> bytes:
    return struct.pack(">I", value)


def be64(value: int) -> bytes:
    return struct.pack(">Q", value)


# --------------------------------------------------------------------------- qcow2


def qcow2_header(data: bytearray) -> Iterator[Attack]:
    yield from each("backing_file", 8, be64, 0x200)
    yield from each("is_qcow", 4, be32, 1)
    yield from each("unknown_version", 4, be32, 0, 4, HUGE32)
    yield from each("cluster_size", 20, be32, 0, 8, 22, 31, 63, HUGE32)
    yield from each("no_size", 24, be64, 0)
    yield from each("odd_size", 24, be64, 1)
    yield from each("disk_too_large", 24, be64, 1 << 50, (1 << 63) - 512, (1 << 64) - 512)
    yield from each("encrypted", 32, be32, 1, 2, 77)
    yield from each("l1_size", 36, be32, 0, 0x7FFFFFFF)
    yield from each("l1_size", 24, be64, 1 << 40)  # a size that the tables do not cover
    yield from each("outside_file", 36, be32, 1 << 22)
    for field in (40, 48):
        yield from each("misaligned", field, be64, 0, 513)
        yield from each("outside_file", field, be64, 1 << 40, (1 << 64) - 65536)
    yield from each("refcount_table", 56, be32, 0, HUGE32)
    yield from each("outside_file", 56, be32, 100)
    yield from each("internal_snapshots", 60, be32, HUGE32)


def extension(kind: int, length: int, data: bytes = b"") -> tuple[int, bytes]:
    """Return a header extension that replaces the first one."""
    return 112, be32(kind) + be32(length) + data


def qcow2_version_3(data: bytearray) -> Iterator[Attack]:
    yield from each("backing_file", 16, be32, 11)  # incomplete: a name without an offset
    yield "backing_file", extension(0xE2792ACA, 3, b"raw".ljust(8, b"\0"))
    # CVE-2024-32498: one of the three places that name a data file is enough.
    yield from each("external_data_file", 72, be64, 4)
    yield from each("external_data_file", 88, be64, 2)
    yield "external_data_file", extension(0x44415441, 8, b"/etc/pwd")
    yield "encrypted", extension(0x0537BE77, 16)
    yield from each("not_closed", 72, be64, 1)
    yield from each("marked_corrupt", 72, be64, 2)
    yield from each("unknown_features", 72, be64, 1 << 5, 1 << 17, 1 << 63)
    yield from each("refcount_order", 96, be32, 7)
    yield from each("header_size", 100, be32, 0, 72, 105, 65536 + 8, 0xFFFFFFF8)
    yield from each("compression", 104, lambda kind: bytes([kind]), 1, 7)
    yield from each("compression", 72, be64, 8)
    for length in (65536, 0x7FFFFFFF, HUGE32):
        yield "header_extension", extension(0x12345678, length)


def qcow2_small_clusters(data: bytearray) -> Iterator[Attack]:
    yield "l1_size", (24, be64(1 << 40)), (36, be32(HUGE32))


def entry(offset: int) -> bytes:
    return be64(offset | 1 << 63)


def l1_l2(data: bytearray) -> tuple[int, int]:
    """Return the offsets of the first-level table and of the first second-level table."""
    (l1,) = struct.unpack_from(">Q", data, 40)
    return int(l1), int(struct.unpack_from(">Q", data, l1)[0]) & 0x00FFFFFFFFFFFE00


def allocated(data: bytearray, width: int = 8) -> list[int]:
    """Return the offsets of second-level entries that name a cluster."""
    table = l1_l2(data)[1]
    places = range(table, table + (1 << data[23]), width)
    return [place for place in places if struct.unpack_from(">Q", data, place)[0]]


def qcow2_tables(data: bytearray) -> Iterator[Attack]:
    (l1, l2), (refcounts,) = l1_l2(data), struct.unpack_from(">Q", data, 48)
    one, other, *_ = allocated(data)
    yield from each("overlap", l1, entry, l1, refcounts)
    yield from each("overlap", l2, entry, l2)
    yield "overlap", (other, bytes(data[one : one + 8]))
    yield from each("overlap", one, entry, l1, l2, 65536, 2 * 65536)  # data in a table
    for place in (one, l1):
        yield from each("outside_file", place, entry, 1 << 40)
        yield from each("misaligned", place, entry, 65536 * 5 + 512)
    yield from each("reserved_bits", l1, entry, l2 | 2)
    yield from each("reserved_bits", one, entry, 65536 * 5 | 1 << 57)
    yield from each("reserved_bits", refcounts, be64, 65536 * 2 | 4)


def qcow2_zeros(data: bytearray) -> Iterator[Attack]:
    yield from each("reserved_bits", allocated(data)[0], entry, 65536 * 5 | 1)


def qcow2_table_twice(data: bytearray) -> Iterator[Attack]:
    """Use one table repeatedly, like a zip bomb."""
    yield from each("cluster_size", 72, be64, 16)  # extended tables need large clusters
    l1, l2 = l1_l2(data)
    assert l2
    yield "overlap", (l1 + 16, bytes(data[l1 : l1 + 8]))


def qcow2_subclusters(data: bytearray) -> Iterator[Attack]:
    yield "reserved_bits", (allocated(data, 16)[0] + 8, b"\xff" * 8)
    yield from each("reserved_bits", l1_l2(data)[1] + (1 << data[23]) - 8, be64, 1)


def qcow2_compressed(data: bytearray) -> Iterator[Attack]:
    one, other, *_ = [place for place in allocated(data) if data[place] & 0x40]
    yield from each("outside_file", one, be64, 1 << 62 | 1 << 40, 1 << 62 | 16, (1 << 63) - 1)
    yield "overlap", (one, bytes(data[other : other + 8]))
    yield from each("overlap", one, be64, 1 << 62 | l1_l2(data)[1] + 24)


# --------------------------------------------------------------------------- VDI


def vdi_header(data: bytearray) -> Iterator[Attack]:
    yield "backing_file", (0x1A8, UUID_BYTES)
    yield "backing_file", (0x1B8, UUID_BYTES)
    yield from each("unknown_version", 0x44, le32, 1, 0x00020001)
    yield from each("backing_file", 0x4C, le32, 3, 4)
    yield from each("vdi_type", 0x4C, le32, 0, 77)
    for field in (0x154, 0x158):
        yield from each("misaligned", field, le32, 513)
        yield from each("outside_file", field, le32, 0xFFFFFE00)
        yield from each("overlap", field, le32, 0)
    yield from each("sector_size", 0x168, le32, 4096)
    yield from each("no_size", 0x170, le64, 0)
    yield from each("odd_size", 0x170, le64, 513)
    yield from each("disk_too_large", 0x170, le64, 1 << 60)
    yield from each("block_count", 0x170, le64, 1 << 40)
    yield from each("block_size", 0x178, le32, 0, 512)
    yield from each("block_size", 0x17C, le32, 512)
    yield from each("block_count", 0x180, le32, 0, HUGE32)
    yield from each("block_count", 0x184, le32, HUGE32)


def vdi_map(data: bytearray) -> Iterator[Attack]:
    (place,) = struct.unpack_from("<I", data, 0x154)
    yield from each("outside_file", place, le32, 0xFFFFFFF0)
    one, other, *_ = [at for at in range(place, place + 32, 4) if data[at : at + 4] != b"\xff" * 4]
    yield "overlap", (one, bytes(data[other : other + 4]))


def vdi_more_blocks(data: bytearray) -> Iterator[Attack]:
    yield from each("outside_file", 0x184, le32, 8)


def vdi_holes(data: bytearray) -> Iterator[Attack]:
    yield from each("block_count", struct.unpack_from("<I", data, 0x154)[0], le32, HUGE32)


# --------------------------------------------------------------------------- VHDX

PARENT = UUID("A8D35F2D-B30B-454D-ABF7-D3D84834AB0C").bytes_le
BAT = UUID("2DC27766-F623-4200-9D64-115E9BFD4A08").bytes_le
METADATA = UUID("8B7CA206-4790-4B9A-B8FE-575F050F886E").bytes_le
PARAMETERS = UUID("CAA16737-FA36-4D43-B3B6-33F0AA44E76B").bytes_le
SIZE_ITEM = UUID("2FA54224-CD1B-4876-B211-5DBED83BF4B8").bytes_le
SECTOR_ITEM = UUID("8141BF1D-A96F-4709-BA47-F233A8FAAB5F").bytes_le


def region(data: bytearray, guid: bytes) -> tuple[int, int]:
    """Return the offsets of the region's entry, and of the region."""
    place = data.index(guid, 3 * KIB64)
    return place, struct.unpack_from("<Q", data, place + 16)[0]


def item(data: bytearray, guid: bytes) -> tuple[int, int]:
    """Return the offsets of a metadata item's entry, and of its value."""
    table = region(data, METADATA)[1]
    place = data.index(guid, table)
    return place, table + int(struct.unpack_from("<I", data, place + 16)[0])


def in_both(code: str, offset: int, *values: bytes) -> Iterator[Attack]:
    """Yield attacks on both copies of a header or of the region table."""
    for new in values:
        yield code, (offset, new), (offset + KIB64, new)


def vhdx_headers(data: bytearray) -> Iterator[Attack]:
    yield "checksum", (KIB64, b"HEAD"), (2 * KIB64, b"HEAD")
    yield from in_both("not_closed", KIB64 + 48, UUID_BYTES)  # a log with pending writes
    yield from in_both("unknown_version", KIB64 + 64, le16(1))
    yield from in_both("unknown_version", KIB64 + 66, le16(2))
    yield from in_both("misaligned", KIB64 + 68, le32(513))
    yield from in_both("misaligned", KIB64 + 72, le64(513))
    yield from in_both("overlap", KIB64 + 72, le64(0))
    yield from in_both("outside_file", KIB64 + 72, le64(1 << 60))


def vhdx_regions(data: bytearray) -> Iterator[Attack]:
    (bat, table), (metadata, items) = region(data, BAT), region(data, METADATA)
    other = UUID_BYTES + le64(table) + le32(MIB)
    yield from in_both("regions", 3 * KIB64 + 8, le32(0), le32(HUGE32))
    yield from in_both("misaligned", bat + 16, le64(513), le64(0))
    yield from in_both("outside_file", bat + 16, le64(1 << 60))
    yield from in_both("overlap", bat + 16, le64(items))
    yield from in_both("overlap", metadata + 16, le64(table))
    yield from in_both("misaligned", bat + 24, le32(0))
    yield from in_both("regions", bat, other + le32(0))
    yield from in_both("unknown_features", bat, other + le32(1))
    yield from in_both("ambiguous", bat, METADATA)


def vhdx_metadata(data: bytearray) -> Iterator[Attack]:
    table = region(data, METADATA)[1]
    (size_item, size), (parameters, block) = item(data, SIZE_ITEM), item(data, PARAMETERS)
    sector = item(data, SECTOR_ITEM)[1]
    yield "backing_file", (parameters, PARENT)
    yield from each("backing_file", block + 4, le32, 2)
    yield "metadata", (table, b"METADATA")
    yield from each("metadata", table + 10, le16, 0, 0xFFFF)
    yield "unknown_features", (size_item, UUID_BYTES)
    yield "ambiguous", (size_item, PARAMETERS)
    yield from each("metadata", size_item + 16, le32, 16, HUGE32)
    yield from each("metadata", size_item + 20, le32, 4)
    yield from each("no_size", size, le64, 0)
    yield from each("odd_size", size, le64, 513)
    yield from each("disk_too_large", size, le64, 1 << 62)
    yield from each("block_count", size, le64, 1 << 45)
    yield from each("block_size", block, le32, 0, 512, 3 * MIB, 1 << 31)
    yield from each("sector_size", sector, le32, 0, 513)


def vhdx_blocks(data: bytearray) -> Iterator[Attack]:
    table, metadata = region(data, BAT)[1], region(data, METADATA)[1]
    yield from each("outside_file", table, le64, 6 | 1 << 50)
    yield from each("overlap", table, le64, 6, 6 | table, 6 | metadata)
    yield from each("reserved_bits", table, le64, 6 | 1 << 10, 4, 5)
    yield from each("backing_file", table, le64, 7 | table)


def vhdx_two_disks(data: bytearray) -> Iterator[Attack]:
    """Two readers could see two different disks."""
    header = data[KIB64 : KIB64 + 72] + le64(2 * MIB) + data[KIB64 + 80 : KIB64 + 4096]
    yield "ambiguous", (2 * KIB64, bytes(header))
    yield "ambiguous", (4 * KIB64 + 32, le64(6 * MIB))
    table = region(data, BAT)[1]
    one, other, *_ = [at for at in range(table, table + 64, 8) if data[at] & 7 == 6]
    yield "overlap", (one, bytes(data[other : other + 8]))


@pytest.mark.parametrize("sample", ["vhdx-dynamic", "vhdx-fixed"])
@pytest.mark.parametrize("place", [KIB64 + 20, 3 * KIB64 + 99])
def test_both_copies_with_a_wrong_checksum_are_refused(lab: Lab, sample: str, place: int) -> None:
    data = lab.data(sample)
    for copy in (place, place + KIB64):
        data[copy] ^= 1
    refused(lab.file(bytes(data)), "checksum")


def test_the_checksum_is_the_standards() -> None:
    assert crc32c(b"123456789") == 0xE3069283


# --------------------------------------------------------------------------- all of them

ATTACKS: dict[str, tuple[Attacks, ...]] = {
    "qcow2-v2": (qcow2_header, qcow2_zeros),
    "qcow2-v3": (qcow2_header, qcow2_version_3, qcow2_tables),
    "qcow2-4k": (qcow2_table_twice,),
    "qcow2-512": (qcow2_small_clusters,),
    "qcow2-extended": (qcow2_subclusters,),
    "qcow2-compressed": (qcow2_compressed,),
    "vdi-dynamic": (vdi_header, vdi_map, vdi_more_blocks),
    "vdi-static": (vdi_header, vdi_map, vdi_holes),
    "vhdx-dynamic": (vhdx_headers, vhdx_regions, vhdx_metadata, vhdx_blocks, vhdx_two_disks),
    "vhdx-fixed": (vhdx_headers, vhdx_regions, vhdx_metadata, vhdx_blocks),
}


@pytest.mark.parametrize(("sample", "attacks"), of_each(ATTACKS))
def test_what_cannot_be_is_refused(lab: Lab, sample: str, attacks: Attacks) -> None:
    lab.attack(sample, attacks)


# --------------------------------------------------------------------------- made by qemu-img


def test_real_references_to_other_files_are_refused(lab: Lab, tmp_path: Path) -> None:
    for name, backing in (("absolute", "/etc/passwd"), ("json", 'json:{"driver":"nbd"}')):
        path = tmp_path / name
        qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", backing, "-F", "raw", path, "1M")
        # The message does not repeat text of the header, which is untrusted.
        assert backing not in refused(path, "backing_file")
        refused(path, "backing_file", pinned="qcow2")
    options = f"data_file={tmp_path}/data,data_file_raw=on"
    qemu_img("create", "-q", "-f", "qcow2", "-o", options, tmp_path / "disk", "1M")
    assert str(tmp_path).encode() in (tmp_path / "disk").read_bytes()
    refused(tmp_path / "disk", "external_data_file")
    backing_vmdk = lab.samples["vmdk-sparse"]
    qemu_img("create", "-q", "-f", "vmdk", "-b", backing_vmdk, "-F", "vmdk", tmp_path / "overlay")
    refused(tmp_path / "overlay", "backing_file")


@pytest.mark.slow
def test_encryption_is_refused(tmp_path: Path) -> None:
    path, secret = tmp_path / "luks", ("--object", "secret,id=s,data=abc")
    options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10"
    for _ in range(20):  # QEMU fails if its benchmark is disturbed ("accurate CPU usage")
        with contextlib.suppress(subprocess.CalledProcessError):
            qemu_img("create", "-q", *secret, "-f", "qcow2", "-o", options, path, "1M")
            break
    refused(path, "encrypted")


def test_internal_snapshots_and_bitmaps_are_refused(lab: Lab) -> None:
    path = lab.copy("qcow2-v3", "snapshot")
    qemu_img("snapshot", "-c", "one", path)
    assert "1 internal snapshots" in refused(path, "internal_snapshots")
    path = lab.copy("qcow2-v3", "bitmap")
    qemu_img("bitmap", "--add", path, "b0")
    refused(path, "bitmaps")


@pytest.mark.parametrize(
    ("format_", "options"),
    [("qcow2", "compression_type=zstd,cluster_size=2M"), ("vmdk", "subformat=streamOptimized")],
)
def test_a_bomb_is_refused(tmp_path: Path, format_: str, options: str) -> None:
    """zstd packs 64 MiB of one letter into some KiB, and a file may hold much of that."""
    raw, bomb = tmp_path / "raw", tmp_path / "bomb"
    raw.write_bytes(b"A" * 64 * MIB)
    qemu_img("convert", "-c", "-f", "raw", "-O", format_, "-o", options, raw, bomb)
    assert inspect_image(bomb).allocated == 64 * MIB
    refused(bomb, "expands_too_much", limits=ImageLimits(expansion_floor=16 * MIB, expansion=4))
