"""Detects the file system at an offset of a disk, from its superblock alone.

Offsets: ext2-4: Linux ``fs/ext4/ext4.h``; XFS: ``fs/xfs/libxfs/xfs_format.h``; btrfs:
``include/uapi/linux/btrfs_tree.h``; FAT: Microsoft's "FAT: General Overview of On-Disk Format" 1.03;
the others: util-linux' ``libblkid/src/superblocks``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

#: Called with offset and length in bytes; returns fewer bytes where the readable part ends.
ReadAt = Callable[[int, int], bytes]

#: File systems that Linux can use for the root.
ROOT_FILESYSTEMS: Final = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "squashfs", "erofs"}
)

_HAS_JOURNAL: Final = 0x4
_EXTENTS: Final = 0x40

#: Offset of the magic number, magic number, name, offset and length of the label.
_MAGIC_NUMBERS: Final = (
    (0, b"hsqs", "squashfs", 0, 0),
    (0, b"LUKS\xba\xbe", "luks", 0, 0),
    (0, b"XFSB", "xfs", 108, 12),
    (3, b"NTFS    ", "ntfs", 0, 0),
    (536, b"LVM2 001", "lvm", 0, 0),
    (1024, b"\xe2\xe1\xf5\xe0", "erofs", 0, 0),
    (1024, b"\x10\x20\xf5\xf2", "f2fs", 0, 0),
    (1080, b"\x53\xef", "ext", 1144, 16),
    (82, b"FAT32   ", "vfat", 71, 11),
    (54, b"FAT16   ", "vfat", 43, 11),
    (54, b"FAT12   ", "vfat", 43, 11),
    (4086, b"SWAPSPACE2", "swap", 1052, 16),
    (0x8001, b"CD001", "iso9660", 0x8028, 32),
    (0x10040, b"_BHRfS_M", "btrfs", 0x1012B, 256),
)


@dataclass(frozen=True)
class FileSystem:
    """Name (``""`` if unknown) and label of a file system."""

    name: str = ""
    label: str = ""


def detect_filesystem(read: ReadAt, offset: int = 0) -> FileSystem:
    """The file system that begins at ``offset``. Reads a few kilobytes."""
    data = read(offset, 4096)
    for magic_offset, magic, name, label, length in _MAGIC_NUMBERS:
        end = magic_offset + len(magic)
        found = data[magic_offset:end] if end <= len(data) else read(offset + magic_offset, len(magic))
        if found == magic:
            text = _text(read(offset + label, length)) if length else ""
            return FileSystem(_ext(data[1024:]) if name == "ext" else name, text)
    return FileSystem()


def _ext(superblock: bytes) -> str:
    if len(superblock) < 0x64:
        return "ext2"
    compatible, incompatible = struct.unpack_from("<II", superblock, 0x5C)
    if incompatible & _EXTENTS:
        return "ext4"
    return "ext3" if compatible & _HAS_JOURNAL else "ext2"


def _text(data: bytes) -> str:
    """A label, safe for terminals: at most 64 characters, no control characters."""
    text = data.split(b"\0")[0].decode("utf-8", "replace").strip()
    return "".join(letter for letter in text if letter.isprintable())[:64]
