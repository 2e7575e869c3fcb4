"""qcow2's tables: a bounded walk that finds what points outside, or twice to the same place.

"Cluster mapping" and "Extended L2 entries" of QEMU's ``docs/interop/qcow2.txt``. Without internal
snapshots every cluster of an honest image is used once. A table that uses one twice turns a small
file into a large disk, or makes data of a table: both are refused.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from images.formats.base import Reader, refusal
from images.formats.regions import Units

if TYPE_CHECKING:
    from images.formats.qcow2 import Header

_OFFSET: Final = 0x00FF_FFFF_FFFF_FE00
_COMPRESSED: Final = 1 << 62
_COPIED: Final = 1 << 63
_ALL_ZEROS: Final = 1
_L1_RESERVED: Final = ~(_OFFSET | _COPIED) & (1 << 64) - 1
_REFCOUNT_RESERVED: Final = 0x1FF


@dataclass
class Walked:
    """What the walk counted: clusters with data, and those of them that are compressed."""

    clusters: int = 0
    compressed: int = 0
    compressed_bytes: int = 0


def words(data: bytes) -> array[int]:
    """Big-endian numbers of 64 bits."""
    numbers = array("Q", data)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def walk(reader: Reader, header: Header) -> Walked:
    """Look at every table. Reads no more than the reader's budget.

    Raises:
        ImageRejected: something points outside of the file, off its grid, or to what is used already.
    """
    units = Units(reader.size, header.cluster)
    units.take_range(0, header.cluster, "the header")
    _take(reader, units, header.l1_offset, header.l1_entries * 8, "the first-level table")
    _take(reader, units, header.refcounts_offset, header.refcounts_size, "the refcount table")
    _refcounts(reader, header, units)
    walked = Walked()
    packed: set[int] = set()
    l1 = words(reader.read(header.l1_offset, header.l1_entries * 8, "the first-level table"))
    for entry in l1:
        if entry & _L1_RESERVED:
            raise refusal("reserved_bits", f"a first-level entry has reserved bits set: {entry:#x}")
        if offset := entry & _OFFSET:
            _take(reader, units, offset, header.cluster, "a second-level table")
            _second_level(reader, header, offset, units, walked, packed)
    for cluster in {offset // header.cluster for offset in packed}:
        units.take(cluster * header.cluster, "a cluster of compressed data")
    if walked.compressed_bytes > reader.size + 512 * walked.compressed:
        raise refusal("overlap", "compressed clusters lie on top of each other")
    return walked


def _take(reader: Reader, units: Units, offset: int, length: int, what: str) -> None:
    if offset + length > reader.size:
        raise refusal(
            "outside_file",
            f"{what} is said to be at byte {offset}, {length} bytes long, outside of the file "
            f"of {reader.size} bytes",
        )
    if length:
        if offset % units.unit:
            raise refusal("misaligned", f"{what} begins at byte {offset}, where none can begin")
        units.take_range(offset, length, what)


def _refcounts(reader: Reader, header: Header, units: Units) -> None:
    """The blocks of reference counts. The counts themselves decide nothing when reading."""
    table = words(reader.read(header.refcounts_offset, header.refcounts_size, "the refcount table"))
    for entry in table:
        if entry & _REFCOUNT_RESERVED:
            raise refusal("reserved_bits", f"a refcount table entry has reserved bits set: {entry:#x}")
        if entry:
            _take(reader, units, entry, header.cluster, "a refcount block")


def _second_level(
    reader: Reader, header: Header, offset: int, units: Units, walked: Walked, packed: set[int]
) -> None:
    table = words(reader.read(offset, header.cluster, "a second-level table"))
    entries = table[::2] if header.extended_l2 else table
    bitmaps = table[1::2] if header.extended_l2 else None
    if bitmaps is not None:
        _subclusters(entries, bitmaps)
    for entry in entries:
        if not entry:
            continue
        if entry & _COMPRESSED:
            _compressed(reader, header, entry, walked, packed)
        else:
            _plain(header, entry, units, walked)


def _subclusters(entries: array[int], bitmaps: array[int]) -> None:
    """Each bitmap says of 32 subclusters which have data and which are zeros, none both."""
    for entry, bitmap in zip(entries, bitmaps, strict=True):
        data, zeros = bitmap & 0xFFFF_FFFF, bitmap >> 32
        if data & zeros or (data and not entry & _OFFSET) or (bitmap and entry & _COMPRESSED):
            raise refusal("reserved_bits", f"a subcluster bitmap that cannot be: {bitmap:#x}")


def _plain(header: Header, entry: int, units: Units, walked: Walked) -> None:
    if entry & ~(_OFFSET | _COPIED | _ALL_ZEROS):
        raise refusal("reserved_bits", f"a second-level entry has reserved bits set: {entry:#x}")
    zeros = bool(entry & _ALL_ZEROS)
    if zeros and (header.version < 3 or header.extended_l2):
        raise refusal("reserved_bits", f"a second-level entry has reserved bits set: {entry:#x}")
    if offset := entry & _OFFSET:
        units.take(offset, "a cluster of data")
        walked.clusters += not zeros


def _compressed(reader: Reader, header: Header, entry: int, walked: Walked, packed: set[int]) -> None:
    """A compressed cluster: its place in bytes, and how many sectors it is in."""
    shift = 62 - (header.cluster.bit_length() - 1 - 8)
    offset = entry & (1 << shift) - 1
    sectors = (entry >> shift & (1 << 62 - shift) - 1) + 1
    begin = offset - offset % 512
    if offset < header.cluster or begin + (sectors - 1) * 512 >= reader.size:
        raise refusal("outside_file", f"a compressed cluster at byte {offset} is outside of the file")
    if offset in packed:
        raise refusal("overlap", f"the compressed cluster at byte {offset} is used more than once")
    packed.add(offset)
    walked.clusters += 1
    walked.compressed += 1
    walked.compressed_bytes += (sectors - 1) * 512
