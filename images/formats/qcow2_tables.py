"""Checks qcow2's tables for entries outside of the file, and for shared clusters.

"Cluster mapping" and "Extended L2 entries" of QEMU's ``docs/interop/qcow2.txt``. Without internal
snapshots every cluster of a valid image is used once. A second use can turn a small file into a large
disk, or expose a table as data: both are rejected.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Final

from images.formats.base import SECTOR, ImageReader, refusal
from images.formats.regions import AllocationMap

if TYPE_CHECKING:
    from images.formats.qcow2 import Qcow2Header

_OFFSET: Final = 0x00FF_FFFF_FFFF_FE00
_COMPRESSED: Final = 1 << 62
_COPIED: Final = 1 << 63
_ALL_ZEROS: Final = 1
_L1_RESERVED: Final = ~(_OFFSET | _COPIED) & (1 << 64) - 1
_REFCOUNT_RESERVED: Final = 0x1FF


def big_endian_words(data: bytes) -> array[int]:
    """Decode big-endian numbers of 64 bits."""
    numbers = array("Q", data)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


class TableWalk:
    """A walk over all tables. clusters: with data; compressed: how many of them are.

    Raises:
        ImageRejected: an offset is outside of the file, misaligned, or in use already.
    """

    def __init__(self, reader: ImageReader, header: Qcow2Header) -> None:
        self.clusters = 0
        self.compressed = 0
        self._reader = reader
        self._header = header
        self._units = AllocationMap(reader.size, header.cluster)
        self._compressed_units = AllocationMap(reader.size, header.cluster)
        self._compressed_bytes = 0
        self._units.mark_range(0, header.cluster, "the header")
        self._mark_table(header.l1_offset, header.l1_entries * 8, "the first-level table")
        self._mark_table(header.refcounts_offset, header.refcounts_size, "the refcount table")
        self._refcounts()
        self._first_level()
        too_much = self._compressed_bytes > reader.size + SECTOR * self.compressed
        if too_much or self._units.overlaps(self._compressed_units):
            raise refusal("overlap", "compressed clusters overlap with other data")

    def _mark_table(self, offset: int, length: int, what: str) -> None:
        if offset + length > self._reader.size:
            raise refusal(
                "outside_file",
                f"{what} should be at byte {offset}, {length} bytes long, outside of the file "
                f"of {self._reader.size} bytes",
            )
        if length:
            if offset % self._header.cluster:
                raise refusal("misaligned", f"{what} begins at byte {offset}, which is misaligned")
            self._units.mark_range(offset, length, what)

    def _refcounts(self) -> None:
        """Check the refcount blocks. The counts themselves do not matter for reading."""
        header = self._header
        data = self._reader.read(header.refcounts_offset, header.refcounts_size, "the refcount table")
        for entry in big_endian_words(data):
            if entry & _REFCOUNT_RESERVED:
                raise refusal("reserved_bits", f"a refcount entry has reserved bits set: {entry:#x}")
            if entry:
                self._mark_table(entry, header.cluster, "a refcount block")

    def _first_level(self) -> None:
        header = self._header
        length = header.l1_entries * 8
        for entry in big_endian_words(
            self._reader.read(header.l1_offset, length, "the first-level table")
        ):
            if entry & _L1_RESERVED:
                raise refusal("reserved_bits", f"a first-level entry has reserved bits set: {entry:#x}")
            if offset := entry & _OFFSET:
                self._mark_table(offset, header.cluster, "a second-level table")
                self._second_level(offset)

    def _second_level(self, offset: int) -> None:
        table = big_endian_words(
            self._reader.read(offset, self._header.cluster, "a second-level table")
        )
        entries = table
        if self._header.extended_l2:
            entries = table[::2]
            _check_subclusters(entries, table[1::2])
        compressed_offsets: set[int] = set()
        for entry in entries:
            if entry & _COMPRESSED:
                self._compressed(entry, compressed_offsets)
            elif entry:
                self._plain(entry)

    def _plain(self, entry: int) -> None:
        zeros = entry & _ALL_ZEROS
        no_zeros = self._header.version < 3 or self._header.extended_l2
        if entry & ~(_OFFSET | _COPIED | _ALL_ZEROS) or (zeros and no_zeros):
            raise refusal("reserved_bits", f"a second-level entry has reserved bits set: {entry:#x}")
        if offset := entry & _OFFSET:
            self._units.mark_once(offset, "a cluster of data")
            self.clusters += not zeros

    def _compressed(self, entry: int, compressed_offsets: set[int]) -> None:
        """Check a compressed cluster: its offset in bytes, and its number of sectors.

        This finds a second use of the same bytes in one table; the expansion limit bounds bytes that
        several tables share.
        """
        cluster, size = self._header.cluster, self._reader.size
        shift = 62 - (cluster.bit_length() - 1 - 8)
        offset = entry & (1 << shift) - 1
        sectors = (entry >> shift & (1 << 62 - shift) - 1) + 1
        last = offset - offset % SECTOR + (sectors - 1) * SECTOR
        if offset < cluster or offset >= size or last >= size:
            raise refusal(
                "outside_file", f"a compressed cluster at byte {offset} is outside of the file"
            )
        if offset in compressed_offsets:
            raise refusal("overlap", f"the compressed cluster at byte {offset} is used more than once")
        compressed_offsets.add(offset)
        for place in range(offset - offset % cluster, last + 1, cluster):
            self._compressed_units.mark(place)
        self.clusters += 1
        self.compressed += 1
        self._compressed_bytes += (sectors - 1) * SECTOR


def _check_subclusters(entries: array[int], bitmaps: array[int]) -> None:
    """Check each bitmap: it marks 32 subclusters as data or as zeros, none as both."""
    for entry, bitmap in zip(entries, bitmaps, strict=True):
        data, zeros = bitmap & 0xFFFF_FFFF, bitmap >> 32
        if data & zeros or (data and not entry & _OFFSET) or (bitmap and entry & _COMPRESSED):
            raise refusal("reserved_bits", f"a subcluster bitmap is not valid: {bitmap:#x}")
