"""Raw disks that look like other formats, and files of several formats at once."""

from __future__ import annotations

import struct

import pytest

from images.formats import Format, refusal_of_raw
from images.formats.signatures import signatures
from images.inspect.inspection import inspect_image
from tests.kit.disk_formats import MADE, SIZE, Lab, disk, refused
from vmjobs.model import MIB

#: Starts of files in formats that are not accepted, and the codes of their refusals.
HEADS = [
    ("is_qcow", b"QFI\xfb\0\0\0\x01"),
    ("is_qed", b"QED\0"),
    ("is_cowd", b"COWD\x01\0\0\0"),
    ("is_sesparse", b"\xbe\xba\xfe\xca\0\0\0\0"),
    ("is_vhd", b"conectix"),
    ("is_parallels", b"WithoutFreeSpace"),
    ("is_luks", b"LUKS\xba\xbe\0\x02"),
    ("is_bochs", b"Bochs Virtual HD Image"),
    ("is_cloop", b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop"),
    ("is_vma", b"VMA\0"),
    ("is_ewf", b"EVF\x09\x0d\x0a\xff\0"),
    # Descriptors of a VMDK.
    ("extents_elsewhere", b'# Disk DescriptorFile\nversion=1\nRW 2048 FLAT "/etc/passwd" 0\n'),
    ("extents_elsewhere", b"version=1\nCID=fffffffe\n"),
    ("extents_elsewhere", b"# nothing\n\n   \r\n# more\nversion=3\r\n"),
    ("extents_elsewhere", b"   # disk descriptorfile\n"),
    ("extents_elsewhere", b"\n\n\nVERSION = 2\n"),
]


@pytest.mark.parametrize(("code", "head"), HEADS)
def test_other_formats_are_refused_by_name(lab: Lab, code: str, head: bytes) -> None:
    path = lab.file(head.ljust(MIB, b"\0"))
    refused(path, code)
    refused(path, "raw_with_header", pinned="raw")
    if code == "extents_elsewhere":
        refused(lab.file(head), code)


@pytest.mark.parametrize(("code", "mark"), [("is_vhd", b"conectix"), ("is_dmg", b"koly")])
def test_trailers_are_seen_too(lab: Lab, code: str, mark: bytes) -> None:
    data = disk() + mark.ljust(512, b"\0")
    refused(lab.file(data), code)
    refused(lab.file(data), "raw_with_header", pinned="raw")
    assert refusal_of_raw(data[:65536], len(data), data[-512:])


def test_a_raw_disk_with_another_formats_header_is_refused(lab: Lab) -> None:
    """CVE-2026-24708 and CVE-2024-32498: format probing must not trust a guest's data."""
    for name in MADE:
        if name != "raw":
            message = refused(lab.samples[name], "raw_with_header", pinned="raw")
            assert MADE[name][0] in message
    header = lab.data("qcow2-v3")[:65536]
    assert "qcow2" in refusal_of_raw(bytes(header), SIZE)
    assert refusal_of_raw(disk()[:65536], SIZE) == ""
    assert refusal_of_raw(b"", 0) == "the disk is empty"


def test_looking_for_descriptors_takes_no_time() -> None:
    for data in (b" " * 65536, b"#" * 65536, b"# \n" * 20000, b"\n #" * 20000):
        assert signatures(data) == ()


def test_files_of_two_formats_are_refused(lab: Lab) -> None:
    for pinned in (None, "qcow2", "vdi"):
        path = lab.patched("qcow2-v2", (0x40, b"\x7f\x10\xda\xbe"))
        message = refused(path, "polyglot", pinned=pinned)
        assert "qcow2" in message
        assert "vdi" in message
    for name in ("qcow2-v3", "vmdk-sparse", "vdi-dynamic", "vhdx-dynamic"):
        refused(lab.file(bytes(lab.data(name)) + b"conectix" + bytes(504)), "polyglot")
    # Firmware sees a disk, and a format probe sees an image.
    for name in ("qcow2-v2", "vmdk-sparse", "vdi-dynamic", "vhdx-dynamic"):
        refused(lab.patched(name, (510, b"\x55\xaa")), "polyglot")
    for name in ("qcow2-v3", "vdi-dynamic", "vhdx-dynamic"):
        refused(lab.patched(name, (0x8001, b"CD001")), "polyglot")


def test_a_cd_image_that_boots_as_a_disk_is_raw(lab: Lab) -> None:
    data = bytearray(MIB)
    data[0x8001:0x8006] = b"CD001"
    assert inspect_image(lab.file(bytes(data))).format is Format.RAW
    data[:2] = b"\xeb\x63"
    data[510:512] = b"\x55\xaa"
    struct.pack_into("<B3xB3xII", data, 446, 0x80, 0x17, 0, MIB // 512)
    assert inspect_image(lab.file(bytes(data))).format is Format.RAW


def test_kernels_and_initrds_are_not_taken_for_formats() -> None:
    for head in (b"MZ" + bytes(510), b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"070701"):
        assert refusal_of_raw(head + bytes(4096), 4096) == ""
