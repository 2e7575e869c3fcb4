"""VHDX, the format of Hyper-V: dynamic and fixed disks without a parent.

Microsoft's open specification [MS-VHDX], sections 2.2 (header), 2.2.3 (region table), 2.3 (log),
2.5 (block allocation table), 2.6 (metadata). All numbers are little-endian. A disk with a log that is
not empty is rejected: a reader would have to replay its writes into the tables first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from images.formats.base import (
    MIB,
    Format,
    ImageDescription,
    ImageLimits,
    ImageReader,
    check_disk,
    check_expansion,
    check_file,
    refusal,
)
from images.formats.crc32c import crc32c
from images.formats.regions import FileRegions
from images.formats.vhdx_tables import VhdxDisk, count_blocks, read_metadata

_KIB64: Final = 64 * 1024
_HEADERS: Final = (_KIB64, 2 * _KIB64)
_HEADER_BYTES: Final = 4096
_REGION_TABLES: Final = (3 * _KIB64, 4 * _KIB64)
_HEADER: Final = struct.Struct("<4sIQ16s16s16sHHIQ")
_REGION: Final = struct.Struct("<16sQII")
_BAT: Final = UUID("2DC27766-F623-4200-9D64-115E9BFD4A08").bytes_le
_METADATA: Final = UUID("8B7CA206-4790-4B9A-B8FE-575F050F886E").bytes_le
_MAX_REGIONS: Final = 2047


@dataclass(frozen=True)
class _Header:
    sequence: int
    log: bytes
    log_version: int
    version: int
    log_length: int
    log_offset: int


def inspect(reader: ImageReader, limits: ImageLimits) -> ImageDescription:
    """Describe a VHDX, after checking its tables. Raises ImageRejected."""
    header = _header(reader)
    regions = FileRegions(reader.size)
    regions.add(0, MIB, "the header")
    regions.add(header.log_offset, header.log_length, "the log")
    places = _regions(reader, regions)
    disk = read_metadata(reader, *places[_METADATA])
    check_disk(disk.virtual_size, limits)
    check_file(disk.virtual_size, reader.size)
    blocks = count_blocks(reader, disk, *places[_BAT], regions)
    allocated = min(blocks * disk.block, disk.virtual_size)
    check_expansion(allocated, reader.size, limits)
    return ImageDescription(
        format=Format.VHDX,
        version="1",
        virtual_size=disk.virtual_size,
        file_size=reader.size,
        allocated=allocated,
        unit=disk.block,
        features=_features(disk),
    )


def _features(disk: VhdxDisk) -> tuple[str, ...]:
    kind = "fixed" if disk.fixed else "dynamic"
    return (kind,) if disk.sector == 512 else (kind, f"sectors of {disk.sector} bytes")


def _header(reader: ImageReader) -> _Header:
    """Return the current header: of the two, the valid one with the larger number."""
    found: list[_Header] = []
    for offset in _HEADERS:
        data = reader.read(offset, _HEADER_BYTES, "a VHDX header")
        fields = _HEADER.unpack_from(data)
        if fields[0] == b"head" and _checksum_holds(data, fields[1]):
            _, _, sequence, _, _, log, log_version, version, log_length, log_offset = fields
            found.append(_Header(sequence, log, log_version, version, log_length, log_offset))
    if not found:
        raise refusal("checksum", "neither of the VHDX's headers is valid")
    if len(found) == 2 and found[0].sequence == found[1].sequence and found[0] != found[1]:
        raise refusal("ambiguous", "the VHDX has two current headers that differ")
    header = max(found, key=lambda each: each.sequence)
    if header.version != 1 or header.log_version != 0:
        raise refusal("unknown_version", f"VHDX of version {header.version} is not supported (only 1)")
    if header.log != bytes(16):
        raise refusal(
            "not_closed",
            "the VHDX was not closed properly: its log has writes that must be replayed",
            hint="attach it to Hyper-V once, or run qemu-img check -r all IMAGE",
        )
    if header.log_length % MIB or header.log_offset % MIB:
        raise refusal("misaligned", "the VHDX's log is misaligned")
    return header


def _checksum_holds(data: bytes, checksum: int) -> bool:
    return crc32c(data[:4] + bytes(4) + data[8:]) == checksum


def _regions(reader: ImageReader, regions: FileRegions) -> dict[bytes, tuple[int, int]]:
    """Return offset and length of block allocation table and metadata, by GUID."""
    tables = []
    for offset in _REGION_TABLES:
        data = reader.read(offset, _KIB64, "a VHDX region table")
        (checksum,) = struct.unpack_from("<I", data, 4)
        if data[:4] == b"regi" and _checksum_holds(data, checksum):
            tables.append(data)
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
