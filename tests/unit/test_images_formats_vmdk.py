"""Attacks with VMDK: each is refused for its own reason."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from formats_kit import SIZE, Lab, le16, le32, le64, qemu_img, refused, stream_with_footer

from images.formats import ImageLimits
from images.inspect.inspection import inspect_image

BOTH = ("vmdk-sparse", "vmdk-stream")
MIB = 1024 * 1024


def extent_line(lab: Lab, name: str) -> bytes:
    """Return the extent's line in the descriptor."""
    data = bytes(lab.data(name))
    begin = data.index(b"RW 16384 SPARSE")
    return data[begin : data.index(b"\n", begin)]


@pytest.mark.parametrize("subformat", ["monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat"])
def test_disks_in_other_files_are_refused(tmp_path: Path, subformat: str) -> None:
    path = tmp_path / "disk.vmdk"
    qemu_img("create", "-q", "-f", "vmdk", "-o", f"subformat={subformat}", path, "1M")
    message = refused(path, "extents_elsewhere")
    assert "descriptor" in message
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
    def written(data: bytearray) -> None:
        for digits in lengths:
            write_cid(data, digits)

    path = lab.changed("vmdk-sparse", written)
    assert inspect_image(path, "vmdk", ImageLimits()).virtual_size == SIZE


def test_one_foreign_byte_among_what_qemu_leaves_behind_is_refused(lab: Lab) -> None:
    def written(data: bytearray) -> None:
        for digits in (8, 6, 3):
            write_cid(data, digits)
        end = data.index(b"\0", data.index(b"# Disk DescriptorFile"))
        data[end + 1] = ord("x")  # two pieces follow, the second one as QEMU leaves it

    refused(lab.changed("vmdk-sparse", written), "descriptor")


@pytest.mark.parametrize("name", BOTH)
def test_a_header_without_capacity_is_refused(lab: Lab, name: str) -> None:
    """QEMU would let the embedded descriptor name other files: any file of the host."""
    refused(lab.patched(name, (12, le64(0))), "extents_elsewhere")
    line = extent_line(lab, name)
    path = lab.replaced(name, line, b'RW 8 FLAT "/etc/hosts" 0'.ljust(len(line)))
    refused(path, "extents_elsewhere")


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    "line",
    [
        b'RW 16384 FLAT "a.vmdk" 0',
        b'RW 16384 SPARSE "/a.vmdk"',
        b'RW 16384 SPARSE "../a"',
        b'RW 16384 SPARSE "nbd:h:1"',
        b"RW 16384 ZERO",
        b'RW 8 SPARSE "a"\nRW 9 SPARSE "b"',
        b'NOACCESS 16384 SPARSE "a"',
        b"# none",
    ],
)
def test_extents_in_other_files_are_refused(lab: Lab, name: str, line: bytes) -> None:
    old = extent_line(lab, name)
    path = lab.replaced(name, old, line.ljust(len(old)))
    refused(path, "extents_elsewhere")


@pytest.mark.parametrize("name", BOTH)
def test_parents_are_refused(lab: Lab, name: str) -> None:
    refused(lab.replaced(name, b"parentCID=ffffffff", b"parentCID=12345678"), "backing_file")
    hint = b'parentFileNameHint="/etc/passwd"'
    old = b'ddb.toolsVersion = "2147483647"\n'
    assert len(hint) == len(old)
    refused(lab.replaced(name, old, hint), "backing_file")
    # QEMU looks here, but a correct parser of descriptors does not.
    refused(lab.patched(name, (512 + 20 * 512 - 200, hint)), "backing_file")
    refused(lab.patched(name, (512 + 20 * 512 - 200, hint.upper())), "backing_file")


def test_real_parents_are_refused(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "overlay.vmdk"
    backing = lab.samples["vmdk-sparse"]
    qemu_img("create", "-q", "-f", "vmdk", "-b", backing, "-F", "vmdk", path)
    refused(path, "backing_file")


@pytest.mark.parametrize("name", BOTH)
def test_descriptors_that_say_two_things_are_refused(lab: Lab, name: str) -> None:
    old = b'ddb.toolsVersion = "2147483647"\n'
    refused(lab.replaced(name, old, b'createType="custom"'), "descriptor")
    refused(lab.replaced(name, old, b"CID=12345678"), "descriptor")
    refused(lab.patched(name, (512 + 15 * 512, b"createType")), "descriptor")


@pytest.mark.parametrize("kind", [b"custom", b"vmfsSparse", b"fullDevice", b"", b"streamOptimized"])
def test_other_types_than_the_headers_are_refused(lab: Lab, kind: bytes) -> None:
    old = b'createType="monolithicSparse"'
    new = b'createType="' + kind + b'"'
    refused(lab.replaced("vmdk-sparse", old, new.ljust(len(old))), "vmdk_type")


@pytest.mark.parametrize("name", BOTH)
def test_headers_that_cannot_be_are_refused(lab: Lab, name: str) -> None:
    for offset, value, code in (
        (4, le32(0), "unknown_version"),
        (4, le32(4), "unknown_version"),
        (8, le32(0xFFFFFFFF), "unknown_features"),
        (12, le64((1 << 63) - 1), "disk_too_large"),
        (12, le64(1 << 60), "disk_too_large"),
        (12, le64(16384 + 128), "capacity"),
        (20, le64(0), "grain_size"),
        (20, le64(3), "grain_size"),
        (20, le64(1 << 40), "grain_size"),
        (28, le64(0), "descriptor"),
        (28, le64(7), "descriptor"),
        (28, le64(1 << 60), "descriptor"),
        (36, le64(0), "descriptor"),
        (36, le64(1 << 60), "descriptor"),
        (44, le32(0), "grain_tables"),
        (44, le32(0xFFFFFFFF), "grain_tables"),
        (72, b"\x01", "not_closed"),
        (73, b"\n\n\n\n", "mangled"),
        (77, le16(9), "compression"),
    ):
        refused(lab.patched(name, (offset, value)), code)


def test_tables_outside_or_on_top_of_each_other_are_refused(lab: Lab) -> None:
    data = lab.data("vmdk-sparse")
    (directory,) = struct.unpack_from("<Q", data, 56)
    refused(lab.patched("vmdk-sparse", (56, le64(1 << 50))), "outside_file")
    refused(lab.patched("vmdk-sparse", (56, le64(1))), "overlap")
    refused(lab.patched("vmdk-sparse", (directory * 512, le32(0xFFFFFFF0))), "truncated")
    refused(lab.patched("vmdk-sparse", (directory * 512, le32(1))), "overlap")
    refused(lab.patched("vmdk-sparse", (directory * 512, le32(directory))), "overlap")


@pytest.mark.parametrize("name", BOTH)
def test_grains_outside_or_shared_are_refused(lab: Lab, name: str) -> None:
    data = lab.data(name)
    (directory,) = struct.unpack_from("<Q", data, 56)
    (table,) = struct.unpack_from("<I", data, directory * 512)
    grains = struct.unpack_from("<512I", data, table * 512)
    *_, other, one = [number for number, grain in enumerate(grains) if grain]
    places = (table * 512 + one * 4, table * 512 + other * 4)
    refused(lab.patched(name, (places[0], le32(0xFFFFFF80))), "outside_file")
    refused(lab.patched(name, (places[0], le32(grains[other]))), "overlap")
    # Uncompressed grains follow each other on a grid that avoids the tables.
    code = "misaligned" if name == "vmdk-sparse" else "overlap"
    refused(lab.patched(name, (places[0], le32(1))), code)
    refused(lab.patched(name, (places[0], le32(table))), code)


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
    refused(lab.patched("vmdk-sparse", (56, le64((1 << 64) - 1))), "truncated")


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    raw, bomb = tmp_path / "raw", tmp_path / "bomb"
    raw.write_bytes(b"A" * 32 * MIB)
    options = "subformat=streamOptimized"
    qemu_img("convert", "-f", "raw", "-O", "vmdk", "-o", options, raw, bomb)
    assert inspect_image(bomb).allocated == 32 * MIB
    refused(bomb, "expands_too_much", limits=ImageLimits(expansion_floor=16 * MIB, expansion=20))


def test_virtualbox_rounds_the_capacity_up_to_whole_grains(lab: Lab) -> None:
    old = extent_line(lab, "vmdk-stream")
    for sectors, taken in ((16384 - 127, True), (16384 - 128, False)):
        new = b'RW %d SPARSE "disk.vmdk"' % sectors
        path = lab.replaced("vmdk-stream", old, new.ljust(len(old)))
        if taken:
            assert inspect_image(path).virtual_size == SIZE
        else:
            refused(path, "capacity")
