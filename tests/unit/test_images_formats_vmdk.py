"""Attacks with VMDK, each refused for its own reason, and unusual VMDKs that are taken."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from images.formats import ImageLimits
from images.inspect.inspection import inspect_image
from tests.kit.disk_formats import (
    HUGE32,
    SIZE,
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
    stream_with_footer,
)


def vmdk_header(data: bytearray) -> Iterator[Attack]:
    yield from each("unknown_version", 4, le32, 0, 4)
    yield from each("unknown_features", 8, le32, HUGE32)
    # Without a capacity QEMU lets the embedded descriptor name any file of the host.
    yield from each("extents_elsewhere", 12, le64, 0)
    yield from each("disk_too_large", 12, le64, (1 << 63) - 1, 1 << 60)
    yield from each("capacity", 12, le64, 16384 + 128)
    yield from each("grain_size", 20, le64, 0, 3, 1 << 40)
    yield from each("descriptor", 28, le64, 0, 7, 1 << 60)
    yield from each("descriptor", 36, le64, 0, 1 << 60)
    yield from each("grain_tables", 44, le32, 0, HUGE32)
    yield "not_closed", (72, b"\x01")
    yield "mangled", (73, b"\n\n\n\n")
    yield from each("compression", 77, le16, 9)


def vmdk_grains(data: bytearray) -> Iterator[Attack]:
    (directory,) = struct.unpack_from("<Q", data, 56)
    (table,) = struct.unpack_from("<I", data, directory * 512)
    grains = [at for at in range(table * 512, table * 512 + 2048, 4) if any(data[at : at + 4])]
    *_, other, one = grains
    yield from each("outside_file", one, le32, 0xFFFFFF80)
    yield "overlap", (one, bytes(data[other : other + 4]))
    # Uncompressed grains follow each other on a grid that avoids the tables.
    code = "overlap" if b"streamOptimized" in data else "misaligned"
    yield from each(code, one, le32, 1, table)


def vmdk_tables(data: bytearray) -> Iterator[Attack]:
    (directory,) = struct.unpack_from("<Q", data, 56)
    yield from each("outside_file", 56, le64, 1 << 50)
    yield from each("overlap", 56, le64, 1)
    yield from each("truncated", 56, le64, (1 << 64) - 1)
    yield from each("truncated", directory * 512, le32, 0xFFFFFFF0)
    yield from each("overlap", directory * 512, le32, 1, directory)


def line_of(data: bytearray, begin: bytes) -> tuple[int, int]:
    """Return offset and length of a descriptor's line."""
    place = data.index(begin)
    return place, data.index(b"\n", place) - place


def instead(data: bytearray, old: bytes, code: str, *lines: bytes) -> Iterator[Attack]:
    """Yield attacks with lines in place of the descriptor's line that begins with ``old``."""
    place, length = line_of(data, old)
    for line in lines:
        assert len(line) <= length
        yield code, (place, line.ljust(length))


def vmdk_extents(data: bytearray) -> Iterator[Attack]:
    yield from instead(
        data,
        b"RW 16384 SPARSE",
        "extents_elsewhere",
        b'RW 8 FLAT "/etc/hosts" 0',
        b'RW 16384 FLAT "a.vmdk" 0',
        b'RW 16384 SPARSE "/a.vmdk"',
        b'RW 16384 SPARSE "../a"',
        b'RW 16384 SPARSE "nbd:h:1"',
        b"RW 16384 ZERO",
        b'RW 8 SPARSE "a"\nRW 9 ZERO',
        b'NOACCESS 16384 SPARSE "a"',
        b"# none",
    )


def vmdk_descriptor(data: bytearray) -> Iterator[Attack]:
    spare, hint = b"ddb.toolsVersion", b'parentFileNameHint="/etc/hosts"'
    yield "backing_file", (data.index(b"parentCID=ffffffff"), b"parentCID=12345678")
    yield from instead(data, spare, "backing_file", hint)
    # QEMU looks here, but a correct parser of descriptors does not.
    for spelling in (hint, hint.upper()):
        yield "backing_file", (512 + 20 * 512 - 200, spelling)
    yield from instead(data, spare, "descriptor", b'createType="custom"', b"CID=12345678")
    yield "descriptor", (512 + 15 * 512, b"createType")


def vmdk_types(data: bytearray) -> Iterator[Attack]:
    for kind in (b"custom", b"vmfsSparse", b"fullDevice", b"", b"streamOptimized"):
        yield from instead(data, b"createType=", "vmdk_type", b'createType="' + kind + b'"')


ATTACKS: dict[str, tuple[Attacks, ...]] = {
    "vmdk-sparse": (vmdk_header, vmdk_grains, vmdk_tables, vmdk_extents, vmdk_descriptor, vmdk_types),
    "vmdk-stream": (vmdk_header, vmdk_grains, vmdk_extents, vmdk_descriptor),
}


@pytest.mark.parametrize(("sample", "attacks"), of_each(ATTACKS))
def test_what_cannot_be_is_refused(lab: Lab, sample: str, attacks: Attacks) -> None:
    lab.attack(sample, attacks)


@pytest.mark.parametrize("subformat", ["monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat"])
def test_vmdks_of_several_files_are_refused(tmp_path: Path, subformat: str) -> None:
    path = tmp_path / "disk.vmdk"
    qemu_img("create", "-q", "-f", "vmdk", "-o", f"subformat={subformat}", path, "1M")
    assert "descriptor" in refused(path, "extents_elsewhere")
    refused(path, "extents_elsewhere", pinned="vmdk")
    refused(path, "raw_with_header", pinned="raw")
    if subformat == "twoGbMaxExtentSparse":  # an extent by itself
        refused(tmp_path / "disk-s001.vmdk", "vmdk_type")


def write_cid(data: bytearray, digits: int) -> None:
    """Write a CID of ``digits`` digits like QEMU, in place (block/vmdk.c, vmdk_write_cid)."""
    begin = data.index(b"# Disk DescriptorFile")
    text = bytes(data[begin : data.index(b"\0", begin)])
    new = re.sub(rb"\nCID=[0-9a-f]+", b"\nCID=" + b"9" * digits, text) + b"\0"
    data[begin : begin + len(new)] = new


@pytest.mark.parametrize(
    "lengths", [*((8, n) for n in range(1, 8)), (8, 6, 3), (8, 7, 5, 4, 1), (8, 2, 5)]
)
def test_what_qemu_leaves_behind_shorter_cids_is_no_fault(lab: Lab, lengths: tuple[int, ...]) -> None:
    data = lab.data("vmdk-sparse")
    for digits in lengths:
        write_cid(data, digits)
    path = lab.file(bytes(data))
    assert inspect_image(path, "vmdk", ImageLimits()).virtual_size == SIZE


def test_one_foreign_byte_among_what_qemu_leaves_behind_is_refused(lab: Lab) -> None:
    data = lab.data("vmdk-sparse")
    for digits in (8, 6, 3):
        write_cid(data, digits)
    end = data.index(b"\0", data.index(b"# Disk DescriptorFile"))
    data[end + 1] = ord("x")  # two pieces follow, the second one as QEMU leaves it
    refused(lab.file(bytes(data)), "descriptor")


def test_a_stream_with_its_tables_at_the_end_is_taken(lab: Lab) -> None:
    found = inspect_image(stream_with_footer(lab))
    assert found.virtual_size == SIZE
    assert found.allocated == inspect_image(lab.samples["vmdk-stream"]).allocated


def test_streams_that_end_otherwise_are_refused(lab: Lab) -> None:
    refused(stream_with_footer(lab, (12, le64(32768))), "footer")
    refused(stream_with_footer(lab, (56, le64((1 << 64) - 1))), "footer")
    whole = stream_with_footer(lab).read_bytes()
    refused(lab.file(whole[:-512]), "truncated")
    refused(lab.file(whole[:-1536] + bytes(1536)), "truncated")


def test_virtualbox_rounds_the_capacity_up_to_whole_grains(lab: Lab) -> None:
    data = bytes(lab.data("vmdk-stream"))
    taken, refused_one = (lab.file(data.replace(b"RW 16384 ", b"RW %d " % n)) for n in (16257, 16256))
    assert inspect_image(taken).virtual_size == SIZE
    refused(refused_one, "capacity")
