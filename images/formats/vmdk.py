"""VMDK: one hosted sparse extent with its descriptor inside, plain or stream-optimized.

Header, markers and grain tables: VMware's "Virtual Disk Format 5.0" (technical note of 2011),
"Hosted Sparse Extents" and "Stream-Optimized Compressed Sparse Extents". The descriptor is checked
as QEMU 7.2 reads it (``block/vmdk.c``): QEMU looks for a parent's name in the 20 sectors from byte
512 on, whatever size the header gives, and reads a header without a capacity as a list of other
files. Other kinds of VMDK are rejected: a descriptor alone, flat and split extents, those of ESX.

All numbers are little-endian; offsets and sizes are in sectors of 512 bytes.
"""

from __future__ import annotations

import re
import struct
from functools import partial
from typing import Final, NamedTuple

from images.formats.base import (
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

_HEADER: Final = struct.Struct("<4sIIQQQQI8xQ8xB4sH")
_NEWLINES: Final = b"\n \r\n"
_GD_AT_END: Final = (1 << 64) - 1
_ZERO_GRAINS, _COMPRESSED, _MARKERS = 1 << 2, 1 << 16, 1 << 17
_KNOWN_FLAGS: Final = 1 | 1 << 1 | _ZERO_GRAINS | _COMPRESSED | _MARKERS
#: Sectors from sector 1 on that QEMU reads as the descriptor.
_DESCRIPTOR_SECTORS: Final = 20
_MAX_DESCRIPTOR: Final = 2048
_NO_PARENT: Final = "ffffffff"
_SINGLE_FILE_HINT: Final = (
    "write it as one file: qemu-img convert -O vmdk -o subformat=monolithicSparse IMAGE NEW"
)
#: Refuses a disk that is not in this file alone.
_refusal_of_parts: Final = partial(refusal, hint=_SINGLE_FILE_HINT)
_EXTENT: Final = re.compile(r'(RW|RDONLY|NOACCESS)\s+(\d+)\s+([A-Z]+)(?:\s+"([^"]*)")?(.*)', re.ASCII)


class _VmdkHeader(NamedTuple):
    magic: bytes
    version: int
    flags: int
    capacity: int
    grain: int
    descriptor: int
    descriptor_sectors: int
    entries: int
    directory: int
    unclean: int
    newlines: bytes
    compression: int

    @property
    def is_compressed(self) -> bool:
        return bool(self.flags & _COMPRESSED)


def inspect(reader: ImageReader) -> ImageDescription:
    """Describe a VMDK, after checking its tables. Raises ImageRejected."""
    extent = _parse(reader, reader.read(0, SECTOR, "the VMDK header"))
    descriptor = _descriptor(reader, extent)
    _check_descriptor(descriptor, extent)
    if extent.directory == _GD_AT_END:
        extent = _footer(reader, extent)
    check_file(reader, extent.capacity * SECTOR)
    return describe(
        reader,
        Format.VMDK,
        str(extent.version),
        "streamOptimized, compressed" if extent.is_compressed else "monolithicSparse",
        virtual_size=extent.capacity * SECTOR,
        units=_count_grains(reader, extent),
        unit=extent.grain * SECTOR,
    )


def _parse(reader: ImageReader, data: bytes) -> _VmdkHeader:
    header = _VmdkHeader._make(_HEADER.unpack_from(data))
    flags, grain = header.flags, header.grain
    if header.magic != b"KDMV":
        raise refusal("not_vmdk", "the file has no VMDK header")
    if header.version not in (1, 2, 3):
        raise refusal(
            "unknown_version", f"VMDK of version {header.version} is not supported (only 1 to 3)"
        )
    if header.newlines != _NEWLINES:
        raise refusal("mangled", "a transfer as text has changed the VMDK's newlines")
    if header.unclean:
        raise refusal("not_closed", "the VMDK was not closed properly")
    if flags & ~_KNOWN_FLAGS:
        raise refusal("unknown_features", f"the VMDK has unknown flags: {flags:#x}")
    compressed = header.is_compressed
    if compressed != bool(flags & _MARKERS) or header.compression != int(compressed):
        raise refusal(
            "compression", f"VMDK compression {header.compression} does not fit flags {flags:#x}"
        )
    if header.capacity == 0:
        raise refusal(
            "extents_elsewhere",
            "the VMDK's header has no capacity, so its descriptor can name other files",
        )
    if header.descriptor != 1 or not 0 < header.descriptor_sectors <= _MAX_DESCRIPTOR:
        raise refusal("descriptor", "the VMDK has no descriptor directly after its header")
    if grain & grain - 1 or not 8 <= grain <= 32768:
        raise refusal("grain_size", f"grains of {grain} sectors (expected 8 to 32768, a power of 2)")
    if header.entries != 512:
        raise refusal("grain_tables", f"grain tables of {header.entries} entries (expected 512)")
    check_disk(reader, header.capacity * SECTOR)
    return header


#: The most hexadecimal digits of a content id.
_CID_DIGITS: Final = 8


def _descriptor(reader: ImageReader, extent: _VmdkHeader) -> str:
    """Return the descriptor's text, after checking all bytes that QEMU reads as one."""
    sectors = max(extent.descriptor_sectors, _DESCRIPTOR_SECTORS)
    length = min(sectors * SECTOR, max(0, reader.size - SECTOR))
    data = reader.read(SECTOR, max(length, 1), "the VMDK's descriptor")
    if b"parentfilenamehint" in data.lower():
        raise _refusal_of_parts(
            "backing_file", "the VMDK has a parent: part of its disk is in another file"
        )
    text, _, rest = data[: extent.descriptor_sectors * SECTOR].partition(b"\0")
    remainder = rest.strip(b"\0")
    # QEMU changes the CID in place: after a shorter number, the ends of earlier texts stay.
    if len(remainder) >= _CID_DIGITS or not all(map(text.endswith, remainder.split(b"\0"))):
        raise refusal("descriptor", "the VMDK has unexpected data after its descriptor")
    return text.decode("latin-1")


def _check_descriptor(text: str, extent: _VmdkHeader) -> None:
    keys: dict[str, str] = {}
    extents = []
    for line in text.replace("\r", "\n").split("\n"):
        line = line.strip()  # noqa: PLW2901 - surrounding white space is ignored
        if found := _EXTENT.fullmatch(line):
            extents.append(found)
        elif line and not line.startswith("#"):
            key, _, value = (part.strip() for part in line.partition("="))
            if key.lower() in keys:
                raise refusal("descriptor", f"the VMDK's descriptor has {key[:40]!r} twice")
            keys[key.lower()] = value.strip('"')
    if keys.get("parentcid", _NO_PARENT).lower() != _NO_PARENT:
        raise _refusal_of_parts("backing_file", "the VMDK is only the difference to a parent")
    kind = keys.get("createtype", "")
    if kind != ("streamOptimized" if extent.is_compressed else "monolithicSparse"):
        raise _refusal_of_parts(
            "vmdk_type",
            f"VMDK of type {kind[:40]!r} is not supported (only monolithicSparse, streamOptimized)",
        )
    if len(extents) != 1:
        raise _refusal_of_parts(
            "extents_elsewhere", f"the VMDK has {len(extents)} extents (expected 1)"
        )
    _check_extent(extents[0], extent)


def _check_extent(line: re.Match[str], extent: _VmdkHeader) -> None:
    access, sectors, kind, name, rest = line.groups()
    if kind != "SPARSE" or access == "NOACCESS" or rest.strip():
        raise _refusal_of_parts(
            "extents_elsewhere", f"the VMDK's extent is {access} {kind}, in another file"
        )
    if not name or "/" in name or "\\" in name or ":" in name:
        raise _refusal_of_parts(
            "extents_elsewhere", "the VMDK's extent is in another file: its name is a path"
        )
    # VirtualBox rounds the capacity up to whole grains.
    said = int(sectors[:20])
    if not said <= extent.capacity <= -(-said // extent.grain) * extent.grain:
        raise refusal(
            "capacity",
            f"the VMDK has {extent.capacity} sectors ({sectors[:20]} according to its descriptor)",
        )


def _footer(reader: ImageReader, head: _VmdkHeader) -> _VmdkHeader:
    """Return the copy of the header at a stream's end, which has the tables' offsets."""
    if not head.is_compressed or reader.size < 4 * SECTOR:
        raise refusal("truncated", "the VMDK lacks the footer, which has the offsets of its tables")
    data = reader.tail(3 * SECTOR)
    marker, footer, end = data[:SECTOR], data[SECTOR : 2 * SECTOR], data[2 * SECTOR :]
    if struct.unpack_from("<QII", marker) != (1, 0, 3) or end.strip(b"\0"):
        raise refusal("truncated", "the VMDK has no end-of-stream marker: it is truncated")
    extent = _parse(reader, footer)
    same = ("flags", "capacity", "grain", "descriptor_sectors")
    if any(getattr(head, name) != getattr(extent, name) for name in same):
        raise refusal("footer", "the VMDK's header and footer differ")
    if extent.directory == _GD_AT_END:
        raise refusal("footer", "the VMDK's footer has no offset of its tables")
    return extent


def _count_grains(reader: ImageReader, extent: _VmdkHeader) -> int:
    """Return the number of grains with data, after checking that each is used once."""
    tables = -(-extent.capacity // (extent.grain * extent.entries))
    regions = FileRegions(reader.size)
    regions.add(0, (1 + extent.descriptor_sectors) * SECTOR, "the header")
    regions.add(extent.directory * SECTOR, tables * 4, "the grain directory")
    data = reader.read(extent.directory * SECTOR, tables * 4, "the grain directory")
    directory = unpack_array(data, "I", "little")
    first = 2 if extent.flags & _ZERO_GRAINS else 1
    # A compressed grain uses at least the sector of its marker. Plain grains have full size, and all
    # offsets differ by multiples of it.
    unit = SECTOR if extent.is_compressed else extent.grain * SECTOR
    used: AllocationMap | None = None
    count = 0
    for table in directory:
        if not table:
            continue
        data = reader.read(table * SECTOR, extent.entries * 4, "a grain table")
        regions.add(table * SECTOR, len(data), "a grain table")
        for grain in unpack_array(data, "I", "little"):
            if grain >= first:
                offset = grain * SECTOR
                used = used or AllocationMap(reader.size, unit, offset % unit)
                used.mark_once(offset, "a grain")
                count += 1
    if used and any(used.overlaps_range(begin, length) for begin, length in regions.ranges()):
        raise refusal("overlap", "a grain overlaps with a table or the header")
    return count
