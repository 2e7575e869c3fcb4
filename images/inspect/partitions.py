"""Reads partition tables, MBR with logical partitions and GPT: bounded, without errors.

GPT: UEFI specification 2.10, section 5.3; partition types: the same, and "Discoverable Partitions
Specification". MBR: the same, section 5.2.1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from images.inspect.filesystems import ReadAt

SECTOR: Final = 512
_MAX_PARTITIONS: Final = 128
_MBR_ENTRY: Final = struct.Struct("<B3xB3xII")
_GPT_ENTRY: Final = struct.Struct("<16s16sQQQ72s")
_EXTENDED: Final = frozenset({0x05, 0x0F, 0x85})
_PROTECTIVE_MBR: Final = 0xEE
_LEGACY_BOOT: Final = 1 << 2

ESP: Final = "EFI system"
BIOS_BOOT: Final = "BIOS boot"
LINUX_ROOT: Final = "Linux root"
LINUX: Final = "Linux"
_MBR_KINDS: Final = {
    0x07: "NTFS",
    0x0B: "FAT",
    0x0C: "FAT",
    0x0E: "FAT",
    0x82: "Linux swap",
    0x83: LINUX,
    0x8E: "Linux LVM",
    0xEF: ESP,
}
_GPT_KINDS: Final = {
    "c12a7328-f81f-11d2-ba4b-00a0c93ec93b": ESP,
    "21686148-6449-6e6f-744e-656564454649": BIOS_BOOT,
    "4f68bce3-e8cd-4db1-96e7-fbcaf984b709": LINUX_ROOT,
    "b921b045-1df0-41c3-af44-4c6f280d3fae": LINUX_ROOT,
    "0fc63daf-8483-4772-8e79-3d69d8477de4": LINUX,
    "0657fd6d-a4ab-43c4-84e5-0933c84b4f4f": "Linux swap",
    "e6d6d379-f507-44c2-a23c-238f2a3df928": "Linux LVM",
    "bc13c2ff-59e6-4262-a352-b275fd6f7172": "Linux boot",
    "9e1a2d38-c612-4316-aa26-8b49521e5a8b": "PowerPC PReP boot",
    "ebd0a0a2-b9e5-4433-87c0-68b6b72699c7": "Microsoft data",
}


@dataclass(frozen=True)
class Partition:
    """One partition. begin, size: bytes. is_active: marked for boot by a BIOS."""

    number: int
    kind: str
    begin: int
    size: int
    is_active: bool = False


@dataclass(frozen=True)
class PartitionTable:
    """A partition table. kind: ``gpt``, ``mbr`` or ``""``. has_boot_code: has boot code."""

    kind: str = ""
    partitions: tuple[Partition, ...] = ()
    has_boot_code: bool = False


def read_partition_table(read: ReadAt) -> PartitionTable:
    """The partition table of a disk, empty if it has no valid one."""
    sector = read(0, SECTOR)
    if len(sector) < SECTOR or sector[510:] != b"\x55\xaa":
        return PartitionTable()
    has_boot_code = any(sector[:440])
    entries = [_MBR_ENTRY.unpack_from(sector, 446 + 16 * number) for number in range(4)]
    if any(status & 0x7F for status, *_ in entries):
        return PartitionTable(has_boot_code=has_boot_code)
    if any(kind == _PROTECTIVE_MBR for _, kind, *_ in entries):
        header = read(SECTOR, SECTOR)
        if header[:8] == b"EFI PART" and len(header) == SECTOR:
            return PartitionTable("gpt", tuple(_gpt_partitions(read, header)), has_boot_code)
    found = tuple(_mbr_partitions(read, entries))
    return PartitionTable("mbr" if found else "", found, has_boot_code)


def _mbr_partitions(read: ReadAt, entries: list[tuple[int, int, int, int]]) -> Iterator[Partition]:
    for number, (status, kind, begin, size) in enumerate(entries, 1):
        if kind in _EXTENDED and size:
            yield from _logical_partitions(read, begin)
        elif kind and size:
            yield Partition(number, _mbr_kind(kind), begin * SECTOR, size * SECTOR, status == 0x80)


def _logical_partitions(read: ReadAt, extended: int) -> Iterator[Partition]:
    """The chain of logical partitions: each names the next, relative to the first."""
    sector_number = extended
    for number in range(5, 5 + _MAX_PARTITIONS):
        sector = read(sector_number * SECTOR, SECTOR)
        if len(sector) < SECTOR or sector[510:] != b"\x55\xaa":
            return
        _, kind, begin, size = _MBR_ENTRY.unpack_from(sector, 446)
        if kind and size:
            yield Partition(number, _mbr_kind(kind), (sector_number + begin) * SECTOR, size * SECTOR)
        _, kind, following, size = _MBR_ENTRY.unpack_from(sector, 462)
        # Forward only, so that a chain cannot be a cycle.
        if kind not in _EXTENDED or not size or extended + following <= sector_number:
            return
        sector_number = extended + following


def _mbr_kind(kind: int) -> str:
    return _MBR_KINDS.get(kind, f"type {kind:#04x}")


def _gpt_partitions(read: ReadAt, header: bytes) -> Iterator[Partition]:
    entries_sector, count, size = struct.unpack_from("<QII", header, 72)
    if not 128 <= size <= 4096 or entries_sector > 1 << 40:
        return
    for number in range(min(count, _MAX_PARTITIONS)):
        entry = read(entries_sector * SECTOR + number * size, _GPT_ENTRY.size)
        if len(entry) < _GPT_ENTRY.size:
            return
        kind, _, first, last, attributes, _name = _GPT_ENTRY.unpack(entry)
        if kind != bytes(16) and first <= last:
            guid = str(UUID(bytes_le=kind))
            yield Partition(
                number + 1,
                _GPT_KINDS.get(guid, guid),
                first * SECTOR,
                (last - first + 1) * SECTOR,
                bool(attributes & _LEGACY_BOOT),
            )
