"""Signatures of file formats, by which programs probe a disk's format.

A guest can write any bytes to a raw disk. So it can make software that probes formats see another
one, and follow references in a forged header: a backing file, a data file (CVE-2024-32498,
CVE-2026-24708). So a raw disk must have no signature at all, and a file in another format only its
own.

Sources: the ``*_probe`` functions of QEMU 7.2's block layer (QEMU decides what libvirt, Nova and
others see), cloop's and bochs' headers there; Microsoft's "Virtual Hard Disk Image Format
Specification" (footer ``conectix``); Apple's UDIF trailer (``koly``); LUKS on-disk format 1 and 2.
"""

from __future__ import annotations

import re
from typing import Final

#: Bytes of a file's beginning and end that are examined.
HEAD: Final = 64 * 1024
TAIL: Final = 512

_AT_BEGIN: Final = (
    (b"QFI\xfb\x00\x00\x00\x01", "qcow"),
    (b"QFI\xfb", "qcow2"),
    (b"QED\0", "qed"),
    (b"KDMV", "vmdk"),
    (b"COWD", "cowd"),
    (b"\xbe\xba\xfe\xca\x00\x00\x00\x00", "sesparse"),
    (b"vhdxfile", "vhdx"),
    (b"conectix", "vhd"),
    (b"cxsparse", "vhd"),
    (b"WithoutFreeSpace", "parallels"),
    (b"WithouFreSpacExt", "parallels"),
    (b"LUKS\xba\xbe", "luks"),
    (b"SKUL\xba\xbe", "luks"),
    (b"Bochs Virtual HD Image", "bochs"),
    (b"#!/bin/sh\n#V2.0 Format\n", "cloop"),
    (b"VMA\0", "vma"),
    (b"EVF\x09\x0d\x0a\xff\x00", "ewf"),
    (b"EVF2\x0d\x0a\x81\x00", "ewf"),
)
_AT_END: Final = ((b"conectix", "vhd"), (b"koly", "dmg"))
_VDI_OFFSET: Final = 0x40
_VDI_MARK: Final = b"\x7f\x10\xda\xbe"

#: How QEMU recognises a VMDK's descriptor: comments and blank lines, then a version.
_DESCRIPTOR: Final = re.compile(rb"(?:#[^\n]*\n|\s)*version\s*=\s*\"?[0-9]", re.IGNORECASE)
_DESCRIPTOR_TITLE: Final = re.compile(rb"\s*#\s*disk descriptorfile", re.IGNORECASE)

#: Files that are not disks, by their first bytes.
_ARCHIVES: Final = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"PK\x03\x04", "zip"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"Rar!\x1a\x07", "rar"),
    (b"070701", "cpio"),
    (b"MSWIM\0\0\0", "wim"),
    (b"\x7fELF", "ELF"),
    (b"%PDF-", "PDF"),
    (b"\x89PNG", "PNG"),
)


def signatures(head: bytes, tail: bytes = b"") -> tuple[str, ...]:
    """Return the image formats that a probe could detect in these bytes, each once.

    head: the file's first :data:`HEAD` bytes (or all); tail: its last :data:`TAIL`.
    """
    found = [name for mark, name in _AT_BEGIN if head.startswith(mark)]
    if "qcow" in found:
        found.remove("qcow2")
    if head[_VDI_OFFSET : _VDI_OFFSET + 4] == _VDI_MARK:
        found.append("vdi")
    if _DESCRIPTOR.match(head[:4096]) or _DESCRIPTOR_TITLE.match(head[:4096]):
        found.append("vmdk-descriptor")
    found += [name for mark, name in _AT_END if tail[-TAIL:].startswith(mark)]
    return tuple(dict.fromkeys(found))


def archive_kind(head: bytes) -> str:
    """Return the kind of a file that is not a disk: ``gzip``, ``tar``, ... or ``""``."""
    for mark, name in _ARCHIVES:
        if head.startswith(mark):
            return name
    return "tar" if head[257:262] == b"ustar" else ""


def has_boot_signature(head: bytes) -> bool:
    """Whether the first sector ends as a boot sector or a partition table does."""
    return head[510:512] == b"\x55\xaa"


def is_iso9660(head: bytes) -> bool:
    """Whether this is the beginning of a CD image, which may be a bootable disk too."""
    return head[0x8001:0x8006] == b"CD001"
