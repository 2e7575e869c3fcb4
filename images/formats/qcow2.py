"""qcow2, versions 2 and 3: the header and its extensions.

Offsets and bits: QEMU's ``docs/interop/qcow2.txt`` ("Header", "Header extensions"); bounds: those of
QEMU 7.2 (``block/qcow2.h``). All numbers are big-endian. Internal snapshots are rejected, not
flattened: they are other disks, and only the user knows which one is meant.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

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
from images.formats.qcow2_tables import TableWalk

_V2: Final = struct.Struct(">4sIQIIQIIQQIIQ")
_V3: Final = struct.Struct(">QQQII")
_V2_BYTES: Final = 72
_V3_BYTES: Final = 104

_DIRTY, _CORRUPT, _DATA_FILE, _COMPRESSION, _EXTENDED_L2 = (1 << bit for bit in range(5))
_INCOMPATIBLE: Final = _DIRTY | _CORRUPT | _DATA_FILE | _COMPRESSION | _EXTENDED_L2
_BITMAPS: Final = 1

_END: Final = 0
_EXT_BACKING_FORMAT: Final = 0xE2792ACA
_EXT_LUKS: Final = 0x0537BE77
_EXT_BITMAPS: Final = 0x23852875
_EXT_DATA_FILE: Final = 0x44415441

_MAX_L1: Final = 32 * MIB
_MAX_REFCOUNT_TABLE: Final = 8 * MIB
_COMPRESSIONS: Final = {0: "zlib", 1: "zstd"}
_FLATTEN_HINT: Final = "make one file of it: qemu-img convert -O qcow2 IMAGE NEW"


@dataclass(frozen=True)
class Qcow2Header:
    """Header fields that :class:`TableWalk` needs. All in bytes, except entries."""

    version: int
    cluster: int
    virtual_size: int
    l1_offset: int
    l1_entries: int
    refcounts_offset: int
    refcounts_size: int
    refcount_order: int
    extended_l2: bool
    compression: str
    header_size: int

    @property
    def l2_entry(self) -> int:
        """Bytes of an entry of a second-level table."""
        return 16 if self.extended_l2 else 8

    @property
    def l2_table_covers(self) -> int:
        """Bytes of the disk that one second-level table maps."""
        return self.cluster // self.l2_entry * self.cluster


def parse(reader: ImageReader, limits: ImageLimits) -> Qcow2Header:
    """Read the header and check it without the tables. Raises ImageRejected."""
    fixed = _V2.unpack(reader.read(0, _V2_BYTES, "the qcow2 header"))
    (_, version, backing_offset, backing_size, cluster_bits, virtual_size, crypt, l1_entries) = fixed[
        :8
    ]
    (l1_offset, refcounts_offset, refcount_clusters, snapshots, _snapshot_offset) = fixed[8:]
    if version not in (2, 3):
        raise refusal("unknown_version", f"qcow2 of version {version} is not supported (only 2 and 3)")
    if backing_offset or backing_size:
        raise refusal(
            "backing_file",
            "the qcow2 image has a backing file: part of its disk is in another file",
            hint=_FLATTEN_HINT,
        )
    if crypt:
        raise refusal("encrypted", "the qcow2 image is encrypted, so no VM can boot it")
    if snapshots:
        raise refusal(
            "internal_snapshots",
            f"the qcow2 image has {snapshots} internal snapshots, which are separate disks",
            hint=_FLATTEN_HINT,
        )
    if not 9 <= cluster_bits <= 21:
        raise refusal("cluster_size", f"clusters of 2^{cluster_bits} bytes (expected 2^9 to 2^21)")
    cluster = 1 << cluster_bits
    order, extended, compression, size = 4, False, "zlib", _V2_BYTES
    if version == 3:
        order, extended, compression, size = _version3(reader, cluster)
    _extensions(reader, size, cluster)
    header = Qcow2Header(
        version=version,
        cluster=cluster,
        virtual_size=virtual_size,
        l1_offset=l1_offset,
        l1_entries=l1_entries,
        refcounts_offset=refcounts_offset,
        refcounts_size=refcount_clusters * cluster,
        refcount_order=order,
        extended_l2=extended,
        compression=compression,
        header_size=size,
    )
    check_disk(virtual_size, limits)
    _check_tables(header)
    return header


def _version3(reader: ImageReader, cluster: int) -> tuple[int, bool, str, int]:
    """Return refcount order, extended L2, compression and header size of version 3."""
    data = reader.read(_V2_BYTES, _V3.size, "the qcow2 header")
    incompatible, _compatible, autoclear, order, size = _V3.unpack(data)
    if incompatible & _DATA_FILE or autoclear & 2:
        raise refusal(
            "external_data_file",
            "the qcow2 image keeps its data in another file",
            hint=_FLATTEN_HINT,
        )
    if incompatible & _CORRUPT:
        raise refusal(
            "marked_corrupt", "the qcow2 image is marked as corrupt", hint="qemu-img check -r all IMAGE"
        )
    if incompatible & _DIRTY:
        raise refusal(
            "not_closed",
            "the qcow2 image was not closed properly: its reference counts may be wrong",
            hint="qemu-img check -r all IMAGE",
        )
    if incompatible & ~_INCOMPATIBLE:
        raise refusal(
            "unknown_features",
            f"the qcow2 image needs unknown features: {incompatible & ~_INCOMPATIBLE:#x}",
        )
    if autoclear & _BITMAPS:
        raise refusal(
            "bitmaps",
            "the qcow2 image has backup bitmaps, which are not part of its disk",
            hint=_FLATTEN_HINT,
        )
    if order > 6:
        raise refusal("refcount_order", f"reference counts of 2^{order} bits (at most 2^6 are allowed)")
    if size < _V3_BYTES or size % 8 or size > cluster:
        raise refusal("header_size", f"the qcow2 header gives its own size as {size} bytes")
    kind = 0
    if size > _V3_BYTES:
        kind = reader.read(_V3_BYTES, 1, "the compression type")[0]
    if kind not in _COMPRESSIONS or (kind != 0) != bool(incompatible & _COMPRESSION):
        raise refusal("compression", f"the qcow2 image uses compression type {kind}, which is unknown")
    extended = bool(incompatible & _EXTENDED_L2)
    if extended and cluster < 16384:
        raise refusal("cluster_size", f"clusters of {cluster} bytes (extended tables need 16 KiB)")
    return order, extended, _COMPRESSIONS[kind], size


def _extensions(reader: ImageReader, offset: int, cluster: int) -> None:
    """Check the header extensions, which must be within the first cluster."""
    end = min(cluster, reader.size)
    while offset + 8 <= end:
        kind, length = struct.unpack(">II", reader.read(offset, 8, "a header extension"))
        if kind == _END:
            return
        if kind == _EXT_BACKING_FORMAT:
            raise refusal(
                "backing_file", "the qcow2 image names a backing file's format", hint=_FLATTEN_HINT
            )
        if kind == _EXT_DATA_FILE:
            raise refusal(
                "external_data_file", "the qcow2 image names an external data file", hint=_FLATTEN_HINT
            )
        if kind == _EXT_LUKS:
            raise refusal("encrypted", "the qcow2 image has a LUKS header, so no VM can boot it")
        if kind == _EXT_BITMAPS:
            raise refusal("bitmaps", "the qcow2 image has backup bitmaps", hint=_FLATTEN_HINT)
        offset += 8 + -(-length // 8) * 8
        if offset > end:
            raise refusal(
                "header_extension", f"a header extension of {length} bytes leaves the header's cluster"
            )


def _check_tables(header: Qcow2Header) -> None:
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


def inspect(reader: ImageReader, limits: ImageLimits) -> ImageDescription:
    """Describe a qcow2 image, after checking all its tables. Raises ImageRejected."""
    header = parse(reader, limits)
    check_file(header.virtual_size, reader.size)
    walked = TableWalk(reader, header)
    allocated = min(walked.clusters * header.cluster, header.virtual_size)
    check_expansion(allocated, reader.size, limits)
    features = []
    if walked.compressed:
        features.append(f"compressed ({header.compression})")
    if header.extended_l2:
        features.append("extended L2 entries")
    return ImageDescription(
        format=Format.QCOW2,
        version=str(header.version),
        virtual_size=header.virtual_size,
        file_size=reader.size,
        allocated=allocated,
        unit=header.cluster,
        features=tuple(features),
    )
