"""VHDX, the format of Hyper-V: dynamic and fixed disks without a parent.

Microsoft's open specification [MS-VHDX], sections 2.2 (header), 2.2.3 (region table), 2.3 (log),
2.5 (block allocation table), 2.6 (metadata). All numbers are little-endian. A disk with a log that is
not empty is rejected: a reader would have to replay its writes into the tables first.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple
from uuid import UUID

from images.formats.base import (
    MIB,
    SECTOR,
    Format,
    ImageDescription,
    ImageReader,
    check_disk,
    check_file,
    describe,
    refusal,
    unpack_array,
)
from images.formats.regions import AllocationMap, FileRegions

_KIB64: Final = 64 * 1024
_HEADERS: Final = (_KIB64, 2 * _KIB64)
_HEADER_BYTES: Final = 4096
_REGION_TABLES: Final = (3 * _KIB64, 4 * _KIB64)
_HEADER: Final = struct.Struct("<8xQ32x16sHHIQ")
_REGION: Final = struct.Struct("<16sQII")
_BAT: Final = UUID("2DC27766-F623-4200-9D64-115E9BFD4A08").bytes_le
_METADATA: Final = UUID("8B7CA206-4790-4B9A-B8FE-575F050F886E").bytes_le
_MAX_REGIONS: Final = 2047

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
_CRC32C_POLYNOMIAL: Final = 0x82F63B78


class _Disk(NamedTuple):
    """The disk as its metadata describes it. All sizes in bytes."""

    block: int
    fixed: bool
    virtual_size: int
    sector: int


def inspect(reader: ImageReader) -> ImageDescription:
    """Describe a VHDX, after checking its tables. Raises ImageRejected."""
    log_offset, log_length = _log(reader)
    regions = FileRegions(reader.size)
    regions.add(0, MIB, "the header")
    regions.add(log_offset, log_length, "the log")
    places = _regions(reader, regions)
    disk = _metadata(reader, *places[_METADATA])
    check_disk(reader, disk.virtual_size)
    check_file(reader, disk.virtual_size)
    features = ["fixed" if disk.fixed else "dynamic"]
    if disk.sector != SECTOR:
        features.append(f"sectors of {disk.sector} bytes")
    return describe(
        reader,
        Format.VHDX,
        "1",
        *features,
        virtual_size=disk.virtual_size,
        units=_count_blocks(reader, disk, *places[_BAT], regions),
        unit=disk.block,
    )


def _crc32c_entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_CRC32C_POLYNOMIAL if value & 1 else 0)
    return value


_CRC32C_TABLE: Final = tuple(_crc32c_entry(value) for value in range(256))


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of headers and tables; slow for more than some kilobytes."""
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFF_FFFF


def _read_copies(
    reader: ImageReader, offsets: tuple[int, int], length: int, mark: bytes, what: str
) -> list[bytes]:
    """Read both copies of a structure; return those with ``mark`` and the right checksum."""
    copies = [reader.read(offset, length, what) for offset in offsets]
    return [
        data
        for data in copies
        if data[:4] == mark
        and crc32c(data[:4] + bytes(4) + data[8:]) == int.from_bytes(data[4:8], "little")
    ]


def _log(reader: ImageReader) -> tuple[int, int]:
    """Return offset and length of the log.

    The current header has them: of the two, the valid one with the larger number.
    """
    copies = _read_copies(reader, _HEADERS, _HEADER_BYTES, b"head", "a VHDX header")
    found = sorted(_HEADER.unpack_from(data) for data in copies)
    if not found:
        raise refusal("checksum", "neither of the VHDX's headers is valid")
    if len(found) == 2 and found[0][0] == found[1][0] and found[0] != found[1]:
        raise refusal("ambiguous", "the VHDX has two current headers that differ")
    _sequence, log, log_version, version, log_length, log_offset = found[-1]
    if version != 1 or log_version != 0:
        raise refusal("unknown_version", f"VHDX of version {version} is not supported (only 1)")
    if log != bytes(16):
        raise refusal(
            "not_closed",
            "the VHDX was not closed properly: its log has writes that must be replayed",
            hint="attach it to Hyper-V once, or run qemu-img check -r all IMAGE",
        )
    if log_length % MIB or log_offset % MIB:
        raise refusal("misaligned", "the VHDX's log is misaligned")
    return log_offset, log_length


def _regions(reader: ImageReader, regions: FileRegions) -> dict[bytes, tuple[int, int]]:
    """Return offset and length of block allocation table and metadata, by GUID."""
    tables = _read_copies(reader, _REGION_TABLES, _KIB64, b"regi", "a VHDX region table")
    if not tables:
        raise refusal("checksum", "neither of the VHDX's region tables is valid")
    if len(tables) == 2 and tables[0][8:] != tables[1][8:]:
        raise refusal("ambiguous", "the VHDX has two region tables that differ")
    (count,) = struct.unpack_from("<I", tables[0], 8)
    if count > _MAX_REGIONS:
        raise refusal("regions", f"the VHDX region table has {count} entries, over the limit")
    found: dict[bytes, tuple[int, int]] = {}
    for number in range(count):
        guid, begin, length, required = _REGION.unpack_from(tables[0], 16 + number * _REGION.size)
        if begin % MIB or length % MIB or length == 0 or begin < MIB:
            raise refusal("misaligned", "a VHDX region has an offset or length that is not allowed")
        if guid in found:
            raise refusal("ambiguous", "the VHDX has a region twice")
        if guid in (_BAT, _METADATA):
            regions.add(begin, length, "a region")
        elif required & 1:
            raise refusal("unknown_features", "the VHDX needs an unknown region")
        found[guid] = (begin, length)
    if not {_BAT, _METADATA} <= set(found):
        raise refusal("regions", "the VHDX has no block allocation table or no metadata")
    return found


def _metadata(reader: ImageReader, offset: int, length: int) -> _Disk:
    """Read the items of the metadata region."""
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


def _disk(items: dict[bytes, bytes]) -> _Disk:
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
    return _Disk(block, bool(flags & _FIXED), virtual_size, sector)


def _count_blocks(
    reader: ImageReader, disk: _Disk, offset: int, length: int, regions: FileRegions
) -> int:
    """Return the number of blocks with data, after checking that each is used once."""
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
    for number, entry in enumerate(unpack_array(data, "Q", "little")):
        state, place = entry & _STATE, entry & _PLACE
        if entry & _RESERVED or state in (4, 5):
            raise refusal("reserved_bits", f"a block allocation entry is not valid: {entry:#x}")
        bitmap = number % (ratio + 1) == ratio
        if (bitmap and state) or state == _PARTLY:
            raise refusal("backing_file", "the VHDX has blocks that are partly in a parent disk")
        if state == _PRESENT:
            if place >= reader.size:
                raise refusal("outside_file", f"a block should be at byte {place}, outside of the file")
            # The file may end before its last block does.
            used.mark_range(place, min(disk.block, reader.size - place), "a block of data")
            present += 1
    return present
