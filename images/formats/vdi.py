"""VDI, the format of VirtualBox: dynamic and fixed images without a parent.

Header: ``include/VBox/vd-image-common.h`` and ``src/VBox/Storage/VDICore.h`` of VirtualBox
(``VDIHEADER1PLUS``), as QEMU 7.2 reads it (``block/vdi.c``). All numbers are little-endian.
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass
from typing import Final

from images.formats.base import (
    MIB,
    SECTOR,
    Format,
    ImageDescription,
    ImageLimits,
    ImageReader,
    check_disk,
    check_expansion,
    check_file,
    refusal,
)
from images.formats.regions import AllocationMap, FileRegions

_HEADER: Final = struct.Struct("<4sIIII256sIIIIIIIQIIII16s16s16s16s")
_OFFSET: Final = 0x40
_MARK: Final = b"\x7f\x10\xda\xbe"
_VERSION: Final = 0x0001_0001
_DYNAMIC, _FIXED, _UNDO, _DIFFERENCE = 1, 2, 3, 4
_NO_UUID: Final = bytes(16)
#: Map entries from here on mean that the block was never written, or discarded.
_NO_BLOCK: Final = 0xFFFF_FFFE


@dataclass(frozen=True)
class _VdiHeader:
    kind: int
    map_offset: int
    data_offset: int
    virtual_size: int
    block: int
    blocks: int
    allocated: int


def inspect(reader: ImageReader, limits: ImageLimits) -> ImageDescription:
    """Describe a VDI, after checking its block map. Raises ImageRejected."""
    image = _parse(reader.read(_OFFSET, _HEADER.size, "the VDI header"), limits)
    check_file(image.virtual_size, reader.size)
    _check_block_map(reader, image)
    allocated = min(image.allocated * image.block, image.virtual_size)
    check_expansion(allocated, reader.size, limits)
    return ImageDescription(
        format=Format.VDI,
        version="1.1",
        virtual_size=image.virtual_size,
        file_size=reader.size,
        allocated=allocated,
        unit=image.block,
        features=("fixed",) if image.kind == _FIXED else ("dynamic",),
    )


def _parse(data: bytes, limits: ImageLimits) -> _VdiHeader:
    (
        mark,
        version,
        _size,
        kind,
        _flags,
        _comment,
        map_offset,
        data_offset,
        _cylinders,
        _heads,
        _sectors,
        sector,
        _unused,
        virtual_size,
        block,
        extra,
        blocks,
        allocated,
        _uuid,
        _modified,
        link,
        parent,
    ) = _HEADER.unpack(data)
    if mark != _MARK:
        raise refusal("not_vdi", "the file has no VDI header")
    if version != _VERSION:
        raise refusal("unknown_version", f"VDI of version {version:#x} is not supported (only 1.1)")
    if kind in (_UNDO, _DIFFERENCE) or link != _NO_UUID or parent != _NO_UUID:
        raise refusal(
            "backing_file",
            "the VDI is only the difference to a parent image",
            hint="make one file of it: VBoxManage clonemedium IMAGE NEW",
        )
    if kind not in (_DYNAMIC, _FIXED):
        raise refusal("vdi_type", f"VDI of type {kind} is not supported (only dynamic and fixed)")
    if sector != SECTOR:
        raise refusal("sector_size", f"sectors of {sector} bytes (expected 512)")
    if block != MIB or extra:
        raise refusal("block_size", f"blocks of {block}+{extra} bytes (expected 1 MiB)")
    check_disk(virtual_size, limits)
    if blocks != -(-virtual_size // block) or allocated > blocks:
        raise refusal(
            "block_count",
            f"{blocks} blocks, {allocated} of them allocated, for a disk of {virtual_size} bytes",
        )
    if map_offset % SECTOR or data_offset % SECTOR:
        raise refusal("misaligned", "the VDI's map or data does not begin with a sector")
    return _VdiHeader(kind, map_offset, data_offset, virtual_size, block, blocks, allocated)


def _check_block_map(reader: ImageReader, image: _VdiHeader) -> None:
    """Check that every entry of the block map names a different block."""
    regions = FileRegions(reader.size)
    regions.add(0, _OFFSET + _HEADER.size, "the header")
    regions.add(image.map_offset, image.blocks * 4, "the block map")
    # The last block may be shorter if the disk ends in it.
    shortest = max(0, image.allocated - 1) * image.block + bool(image.allocated)
    regions.add(image.data_offset, shortest, "the data")
    numbers = array("I", reader.read(image.map_offset, image.blocks * 4, "the block map"))
    if sys.byteorder == "big":
        numbers.byteswap()
    blocks, count = AllocationMap(image.allocated, 1), 0
    for number in numbers:
        if number < _NO_BLOCK:
            blocks.mark_once(number, "a block of data")
            count += 1
    if image.kind == _FIXED and count != image.blocks:
        raise refusal("block_count", "the fixed VDI lacks some of its blocks")
