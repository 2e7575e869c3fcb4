"""VHDX's metadata and block allocation table: [MS-VHDX], sections 2.5 and 2.6."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from images.formats.base import MIB, ImageReader, refusal
from images.formats.regions import AllocationMap, FileRegions

_KIB64: Final = 64 * 1024
_ENTRY: Final = struct.Struct("<16sIII4x")
_MAX_ENTRIES: Final = 1024
_REQUIRED: Final = 4

_PARAMETERS: Final = UUID("CAA16737-FA36-4D43-B3B6-33F0AA44E76B").bytes_le
_SIZE: Final = UUID("2FA54224-CD1B-4876-B211-5DBED83BF4B8").bytes_le
_PAGE83: Final = UUID("BECA12AB-B2E6-4523-93EF-C309E000C746").bytes_le
_LOGICAL: Final = UUID("8141BF1D-A96F-4709-BA47-F233A8FAAB5F").bytes_le
_PHYSICAL: Final = UUID("CDA348C7-445D-4471-9CC9-E9885251C556").bytes_le
_PARENT: Final = UUID("A8D35F2D-B30B-454D-ABF7-D3D84834AB0C").bytes_le
_KNOWN: Final = {_PARAMETERS: 8, _SIZE: 8, _PAGE83: 16, _LOGICAL: 4, _PHYSICAL: 4}

_FIXED, _HAS_PARENT = 1, 2
_STATE: Final = 7
_NOT_PRESENT, _UNDEFINED, _ZERO, _UNMAPPED, _PRESENT, _PARTLY = 0, 1, 2, 3, 6, 7
_PLACE: Final = ~0xFFFFF & (1 << 64) - 1
_RESERVED: Final = 0xFFFF8
#: Sectors that one sector bitmap block covers (2.5.1.2).
_BITMAP_SECTORS: Final = 1 << 23


@dataclass(frozen=True)
class VhdxDisk:
    """The disk as its metadata describes it. All sizes in bytes."""

    block: int
    fixed: bool
    virtual_size: int
    sector: int


def read_metadata(reader: ImageReader, offset: int, length: int) -> VhdxDisk:
    """Read the items of the metadata region. Raises ImageRejected."""
    table = reader.read(offset, min(length, _KIB64), "the VHDX metadata")
    (count,) = struct.unpack_from("<H", table, 10)
    if table[:8] != b"metadata" or count >= _MAX_ENTRIES:
        raise refusal("metadata", "the VHDX metadata table is damaged")
    items: dict[bytes, bytes] = {}
    for number in range(count):
        guid, begin, size, flags = _ENTRY.unpack_from(table, 32 + number * _ENTRY.size)
        if guid == _PARENT:
            raise refusal("backing_file", "the VHDX names a parent disk")
        if guid in items:
            raise refusal("ambiguous", "the VHDX metadata has an item twice")
        if guid not in _KNOWN:
            if flags & _REQUIRED:
                raise refusal("unknown_features", "the VHDX needs unknown metadata")
            continue
        if size != _KNOWN[guid] or begin < _KIB64 or begin + size > length:
            raise refusal("metadata", "a VHDX metadata item has a wrong size or offset")
        items[guid] = reader.read(offset + begin, size, "a VHDX metadata item")
    if not {_PARAMETERS, _SIZE, _LOGICAL} <= set(items):
        raise refusal("metadata", "the VHDX metadata has no block size, disk size or sector size")
    return _disk(items)


def _disk(items: dict[bytes, bytes]) -> VhdxDisk:
    block, flags = struct.unpack("<II", items[_PARAMETERS])
    (virtual_size,) = struct.unpack("<Q", items[_SIZE])
    (sector,) = struct.unpack("<I", items[_LOGICAL])
    if flags & _HAS_PARENT:
        raise refusal(
            "backing_file",
            "the VHDX is only the difference to a parent disk",
            hint="make one file of it: Convert-VHD, or qemu-img convert -O vhdx IMAGE NEW",
        )
    if not MIB <= block <= 256 * MIB or block & block - 1:
        raise refusal("block_size", f"blocks of {block} bytes (expected 1 to 256 MiB, a power of 2)")
    if sector not in (512, 4096):
        raise refusal("sector_size", f"sectors of {sector} bytes (expected 512 or 4096)")
    if virtual_size % sector:
        raise refusal("odd_size", f"the disk of {virtual_size} bytes is no whole number of sectors")
    return VhdxDisk(block, bool(flags & _FIXED), virtual_size, sector)


def count_blocks(
    reader: ImageReader, disk: VhdxDisk, offset: int, length: int, regions: FileRegions
) -> int:
    """Return the number of blocks with data, after checking that each is used once.

    Raises ImageRejected.
    """
    ratio = _BITMAP_SECTORS * disk.sector // disk.block
    blocks = -(-disk.virtual_size // disk.block)
    entries = blocks + (blocks - 1) // ratio
    if entries * 8 > length:
        raise refusal("block_count", f"the block allocation table is too short for {blocks} blocks")
    data = reader.read(offset, entries * 8, "the VHDX table of blocks")
    used = AllocationMap(reader.size, MIB)
    for begin, size in regions.ranges():
        used.mark_range(begin, size, "a region")
    present = 0
    for number, (entry,) in enumerate(struct.iter_unpack("<Q", data)):
        state, place = entry & _STATE, entry & _PLACE
        if entry & _RESERVED or state in (4, 5):
            raise refusal("reserved_bits", f"a block allocation entry is not valid: {entry:#x}")
        bitmap = number % (ratio + 1) == ratio
        if (bitmap and state) or state == _PARTLY:
            raise refusal("backing_file", "the VHDX has blocks that are partly in a parent disk")
        if state == _PRESENT:
            _check_block(reader, disk, place, used)
            present += 1
    return present


def _check_block(reader: ImageReader, disk: VhdxDisk, place: int, used: AllocationMap) -> None:
    if place >= reader.size:
        raise refusal("outside_file", f"a block should be at byte {place}, outside of the file")
    # The file may end before its last block does.
    used.mark_range(place, min(disk.block, reader.size - place), "a block of data")
