"""VDI, the format of VirtualBox: dynamic and fixed images without a parent.

Header: ``include/VBox/vd-image-common.h`` and ``src/VBox/Storage/VDICore.h`` of VirtualBox
(``VDIHEADER1PLUS``), as QEMU 7.2 reads it (``block/vdi.c``). All numbers are little-endian.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

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

_HEADER: Final = struct.Struct("<4sI4xI260xII12xI4xQIIII32x16s16s")
_OFFSET: Final = 0x40
_MARK: Final = b"\x7f\x10\xda\xbe"
_VERSION: Final = 0x0001_0001
_DYNAMIC, _FIXED, _UNDO, _DIFFERENCE = 1, 2, 3, 4
#: Map entries from here on mean that the block was never written, or discarded.
_NO_BLOCK: Final = 0xFFFF_FFFE


class _VdiHeader(NamedTuple):
    mark: bytes
    version: int
    kind: int
    map_offset: int
    data_offset: int
    sector: int
    virtual_size: int
    block: int
    extra: int
    blocks: int
    allocated: int
    link: bytes
    parent: bytes


def inspect(reader: ImageReader) -> ImageDescription:
    """Describe a VDI, after checking its block map. Raises ImageRejected."""
    image = _VdiHeader._make(_HEADER.unpack(reader.read(_OFFSET, _HEADER.size, "the VDI header")))
    _check_header(reader, image)
    check_file(reader, image.virtual_size)
    _check_block_map(reader, image)
    return describe(
        reader,
        Format.VDI,
        "1.1",
        "fixed" if image.kind == _FIXED else "dynamic",
        virtual_size=image.virtual_size,
        units=image.allocated,
        unit=image.block,
    )


def _check_header(reader: ImageReader, image: _VdiHeader) -> None:
    if image.mark != _MARK:
        raise refusal("not_vdi", "the file has no VDI header")
    if image.version != _VERSION:
        raise refusal(
            "unknown_version", f"VDI of version {image.version:#x} is not supported (only 1.1)"
        )
    if image.kind in (_UNDO, _DIFFERENCE) or any(image.link + image.parent):
        raise refusal(
            "backing_file",
            "the VDI is only the difference to a parent image",
            hint="make one file of it: VBoxManage clonemedium IMAGE NEW",
        )
    if image.kind not in (_DYNAMIC, _FIXED):
        raise refusal("vdi_type", f"VDI of type {image.kind} is not supported (only dynamic and fixed)")
    if image.sector != SECTOR:
        raise refusal("sector_size", f"sectors of {image.sector} bytes (expected 512)")
    if image.block != MIB or image.extra:
        raise refusal("block_size", f"blocks of {image.block}+{image.extra} bytes (expected 1 MiB)")
    check_disk(reader, image.virtual_size)
    if image.blocks != -(-image.virtual_size // image.block) or image.allocated > image.blocks:
        raise refusal(
            "block_count",
            f"{image.blocks} blocks, {image.allocated} of them allocated, "
            f"for a disk of {image.virtual_size} bytes",
        )
    if image.map_offset % SECTOR or image.data_offset % SECTOR:
        raise refusal("misaligned", "the VDI's map or data does not begin with a sector")


def _check_block_map(reader: ImageReader, image: _VdiHeader) -> None:
    """Check that every entry of the block map names a different block."""
    regions = FileRegions(reader.size)
    regions.add(0, _OFFSET + _HEADER.size, "the header")
    regions.add(image.map_offset, image.blocks * 4, "the block map")
    # The last block may be shorter if the disk ends in it.
    shortest = max(0, image.allocated - 1) * image.block + bool(image.allocated)
    regions.add(image.data_offset, shortest, "the data")
    data = reader.read(image.map_offset, image.blocks * 4, "the block map")
    blocks, count = AllocationMap(image.allocated, 1), 0
    for number in unpack_array(data, "I", "little"):
        if number < _NO_BLOCK:
            blocks.mark_once(number, "a block of data")
            count += 1
    if image.kind == _FIXED and count != image.blocks:
        raise refusal("block_count", "the fixed VDI lacks some of its blocks")
