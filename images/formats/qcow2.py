"""qcow2, versions 2 and 3: the header and its extensions.

Offsets and bits: QEMU's ``docs/interop/qcow2.txt`` ("Header", "Header extensions"); bounds: those of
QEMU 7.2 (``block/qcow2.h``). All numbers are big-endian. Internal snapshots are rejected, not
flattened: they are other disks, and only the user knows which one is meant.

Tables: "Cluster mapping" and "Extended L2 entries" of the same document. Without internal snapshots
every cluster of a valid image is used once. A second use can turn a small file into a large disk, or
expose a table as data: both are rejected.
"""

from __future__ import annotations

import struct
from array import array
from functools import partial
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
from images.formats.regions import AllocationMap

_V2: Final = struct.Struct(">4xIQIIQIIQQII8x")
_V3: Final = struct.Struct(">Q8xQII")
_V2_BYTES: Final = 72
_V3_BYTES: Final = 104

_DIRTY, _CORRUPT, _DATA_FILE, _COMPRESSION, _EXTENDED_L2 = (1 << bit for bit in range(5))
_INCOMPATIBLE: Final = _DIRTY | _CORRUPT | _DATA_FILE | _COMPRESSION | _EXTENDED_L2
_BITMAPS: Final = 1

_MAX_L1: Final = 32 * MIB
_MAX_REFCOUNT_TABLE: Final = 8 * MIB
_COMPRESSIONS: Final = ("zlib", "zstd")
_FLATTEN_HINT: Final = "make one file of it: qemu-img convert -O qcow2 IMAGE NEW"
#: Refuses a file that is not one plain disk.
_refusal_of_parts: Final = partial(refusal, hint=_FLATTEN_HINT)
_CHECK_HINT: Final = "qemu-img check -r all IMAGE"

_LAST_EXTENSION: Final = 0
#: Header extensions: code, message and hint of the refusal.
_REFUSED_EXTENSIONS: Final = {
    0xE2792ACA: ("backing_file", "the qcow2 image names a backing file's format", _FLATTEN_HINT),
    0x0537BE77: ("encrypted", "the qcow2 image has a LUKS header, so no VM can boot it", ""),
    0x23852875: ("bitmaps", "the qcow2 image has backup bitmaps", _FLATTEN_HINT),
    0x44415441: ("external_data_file", "the qcow2 image names an external data file", _FLATTEN_HINT),
}

_OFFSET: Final = 0x00FF_FFFF_FFFF_FE00
_COMPRESSED: Final = 1 << 62
_COPIED: Final = 1 << 63
_ALL_ZEROS: Final = 1
_L1_RESERVED: Final = ~(_OFFSET | _COPIED) & (1 << 64) - 1
_REFCOUNT_RESERVED: Final = 0x1FF


class _Header(NamedTuple):
    """The header's fields; version 2 lacks those that have a default."""

    version: int
    backing_offset: int
    backing_size: int
    cluster_bits: int
    virtual_size: int
    encryption: int
    l1_entries: int
    l1_offset: int
    refcounts_offset: int
    refcount_clusters: int
    snapshots: int
    incompatible: int = 0
    autoclear: int = 0
    refcount_order: int = 4
    size: int = _V2_BYTES

    @property
    def cluster(self) -> int:
        """Bytes of a cluster."""
        return 1 << self.cluster_bits

    @property
    def extended_l2(self) -> bool:
        return bool(self.incompatible & _EXTENDED_L2)

    @property
    def refcounts_size(self) -> int:
        """Bytes of the refcount table."""
        return self.refcount_clusters * self.cluster

    @property
    def l2_table_covers(self) -> int:
        """Bytes of the disk that one second-level table maps."""
        return self.cluster // (16 if self.extended_l2 else 8) * self.cluster


def inspect(reader: ImageReader) -> ImageDescription:
    """Describe a qcow2 image, after checking all its tables. Raises ImageRejected."""
    header = _parse(reader)
    check_file(reader, header.virtual_size)
    walked = _TableWalk(reader, header)
    features = []
    if walked.compressed:
        features.append(f"compressed ({_COMPRESSIONS[bool(header.incompatible & _COMPRESSION)]})")
    if header.extended_l2:
        features.append("extended L2 entries")
    return describe(
        reader,
        Format.QCOW2,
        str(header.version),
        *features,
        virtual_size=header.virtual_size,
        units=walked.clusters,
        unit=header.cluster,
    )


def _parse(reader: ImageReader) -> _Header:
    """Read the header and check it without the tables."""
    header = _Header(*_V2.unpack(reader.read(0, _V2_BYTES, "the qcow2 header")))
    if header.version not in (2, 3):
        raise refusal(
            "unknown_version", f"qcow2 of version {header.version} is not supported (only 2 and 3)"
        )
    if header.backing_offset or header.backing_size:
        raise _refusal_of_parts(
            "backing_file", "the qcow2 image has a backing file: part of its disk is in another file"
        )
    if header.encryption:
        raise refusal("encrypted", "the qcow2 image is encrypted, so no VM can boot it")
    if header.snapshots:
        raise _refusal_of_parts(
            "internal_snapshots",
            f"the qcow2 image has {header.snapshots} internal snapshots, which are separate disks",
        )
    if not 9 <= header.cluster_bits <= 21:
        raise refusal(
            "cluster_size", f"clusters of 2^{header.cluster_bits} bytes (expected 2^9 to 2^21)"
        )
    if header.version == 3:
        header = _version3(reader, header)
    _extensions(reader, header)
    check_disk(reader, header.virtual_size)
    _check_tables(header)
    return header


def _version3(reader: ImageReader, header: _Header) -> _Header:
    """Return the header with the fields of version 3."""
    data = reader.read(_V2_BYTES, _V3.size, "the qcow2 header")
    incompatible, autoclear, order, size = _V3.unpack(data)
    header = header._replace(
        incompatible=incompatible, autoclear=autoclear, refcount_order=order, size=size
    )
    if incompatible & _DATA_FILE or autoclear & 2:
        raise _refusal_of_parts("external_data_file", "the qcow2 image keeps its data in another file")
    if incompatible & _CORRUPT:
        raise refusal("marked_corrupt", "the qcow2 image is marked as corrupt", hint=_CHECK_HINT)
    if incompatible & _DIRTY:
        raise refusal(
            "not_closed",
            "the qcow2 image was not closed properly: its reference counts may be wrong",
            hint=_CHECK_HINT,
        )
    if incompatible & ~_INCOMPATIBLE:
        raise refusal(
            "unknown_features",
            f"the qcow2 image needs unknown features: {incompatible & ~_INCOMPATIBLE:#x}",
        )
    if autoclear & _BITMAPS:
        raise _refusal_of_parts(
            "bitmaps", "the qcow2 image has backup bitmaps, which are not part of its disk"
        )
    if order > 6:
        raise refusal("refcount_order", f"reference counts of 2^{order} bits (at most 2^6 are allowed)")
    if size < _V3_BYTES or size % 8 or size > header.cluster:
        raise refusal("header_size", f"the qcow2 header gives its own size as {size} bytes")
    kind = 0
    if size > _V3_BYTES:
        kind = reader.read(_V3_BYTES, 1, "the compression type")[0]
    if kind != bool(incompatible & _COMPRESSION):
        raise refusal("compression", f"the qcow2 image uses compression type {kind}, which is unknown")
    if header.extended_l2 and header.cluster < 16384:
        raise refusal(
            "cluster_size", f"clusters of {header.cluster} bytes (extended tables need 16 KiB)"
        )
    return header


def _extensions(reader: ImageReader, header: _Header) -> None:
    """Check the header extensions, which must be within the first cluster."""
    offset, end = header.size, min(header.cluster, reader.size)
    while offset + 8 <= end:
        kind, length = struct.unpack(">II", reader.read(offset, 8, "a header extension"))
        if kind == _LAST_EXTENSION:
            return
        if kind in _REFUSED_EXTENSIONS:
            code, message, hint = _REFUSED_EXTENSIONS[kind]
            raise refusal(code, message, hint=hint)
        offset += 8 + -(-length // 8) * 8
        if offset > end:
            raise refusal(
                "header_extension", f"a header extension of {length} bytes leaves the header's cluster"
            )


def _check_tables(header: _Header) -> None:
    """Check that the tables' sizes fit the disk and their offsets are possible."""
    needed = -(-header.virtual_size // header.l2_table_covers)
    if header.l1_entries * 8 > _MAX_L1 or needed * 8 > _MAX_L1:
        raise refusal(
            "l1_size", f"the first-level table has {header.l1_entries} entries, over the limit"
        )
    if header.l1_entries < needed:
        raise refusal(
            "l1_size",
            f"the first-level table has {header.l1_entries} entries "
            f"(a disk of {header.virtual_size} bytes needs {needed})",
        )
    if not 0 < header.refcounts_size <= _MAX_REFCOUNT_TABLE:
        raise refusal("refcount_table", f"the refcount table has {header.refcounts_size} bytes")
    for offset, what in (
        (header.l1_offset, "the first-level table"),
        (header.refcounts_offset, "the refcount table"),
    ):
        if offset == 0 or offset % header.cluster:
            raise refusal("misaligned", f"{what} begins at byte {offset}, which is misaligned")


class _TableWalk:
    """A walk over all tables. clusters: with data; compressed: how many of them are.

    Raises:
        ImageRejected: an offset is outside of the file, misaligned, or in use already.
    """

    def __init__(self, reader: ImageReader, header: _Header) -> None:
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

    def _table(self, offset: int, length: int, what: str) -> array[int]:
        return unpack_array(self._reader.read(offset, length, what), "Q", "big")

    def _refcounts(self) -> None:
        """Check the refcount blocks. The counts themselves do not matter for reading."""
        header = self._header
        for entry in self._table(header.refcounts_offset, header.refcounts_size, "the refcount table"):
            if entry & _REFCOUNT_RESERVED:
                raise refusal("reserved_bits", f"a refcount entry has reserved bits set: {entry:#x}")
            if entry:
                self._mark_table(entry, header.cluster, "a refcount block")

    def _first_level(self) -> None:
        header = self._header
        for entry in self._table(header.l1_offset, header.l1_entries * 8, "the first-level table"):
            if entry & _L1_RESERVED:
                raise refusal("reserved_bits", f"a first-level entry has reserved bits set: {entry:#x}")
            if offset := entry & _OFFSET:
                self._mark_table(offset, header.cluster, "a second-level table")
                self._second_level(offset)

    def _second_level(self, offset: int) -> None:
        table = self._table(offset, self._header.cluster, "a second-level table")
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
