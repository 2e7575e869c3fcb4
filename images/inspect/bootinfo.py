"""Suggests how a disk boots, from its first sectors. Users can override the suggestion.

Nothing is mounted or run; a few kilobytes are read, and no content is an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from images.inspect import filesystems, partitions
from images.inspect.filesystems import ROOT_FILESYSTEMS, FileSystem, ReadAt
from images.inspect.partitions import BIOS_BOOT, ESP, LINUX, LINUX_ROOT, Partition, PartitionTable
from vmjobs.model import BootMethod


@dataclass(frozen=True)
class Volume:
    """A partition and its file system. begin, size: bytes."""

    number: int
    kind: str
    begin: int
    size: int
    filesystem: str
    label: str


@dataclass(frozen=True)
class BootInfo:
    """Facts about how a disk boots, found without booting it.

    boot: the suggested boot method; ``None``: none was found. methods: all methods that were found,
        best first. partition: number of the root partition, for ``kernel``; 0: the whole disk is one
        file system. table: ``gpt``, ``mbr`` or ``""``. filesystem, label: of a file system that
        begins at the disk's first byte. why: one sentence about the suggestion.
    """

    boot: BootMethod | None
    why: str
    methods: tuple[BootMethod, ...] = ()
    partition: int = 0
    table: str = ""
    partitions: tuple[Volume, ...] = ()
    filesystem: str = ""
    label: str = ""

    @property
    def is_disk(self) -> bool:
        """Whether the data has a partition table, a file system or boot code."""
        return bool(self.table or self.filesystem or self.methods)


def detect_boot(file: Path | BinaryIO) -> BootInfo:
    """How the raw disk in ``file`` can boot. Raises OSError if it cannot be read."""
    if isinstance(file, Path):
        with file.open("rb", buffering=0) as opened:
            return detect_boot(opened)
    descriptor = file.fileno()
    return detect_boot_with(lambda offset, length: _pread(descriptor, offset, length))


def detect_boot_of_bytes(head: bytes) -> BootInfo:
    """The same for a disk of which only the first bytes (some MiB) are available."""
    return detect_boot_with(lambda offset, length: head[offset : offset + length])


def detect_boot_with(read: ReadAt) -> BootInfo:
    """The same for a disk that a function reads."""
    disk_filesystem, table = filesystems.detect_filesystem(read), partitions.read_partition_table(read)
    if disk_filesystem.name and disk_filesystem.name != "iso9660":
        return _boot_info_of_filesystem(disk_filesystem)
    volumes = tuple(_make_volume(read, partition) for partition in table.partitions)
    methods = list(_find_methods(disk_filesystem, table))
    root = _find_root(volumes)
    if root is not None:
        methods.append(BootMethod.KERNEL)
    return BootInfo(
        boot=methods[0] if methods else None,
        why=_explain(methods, disk_filesystem, table, root),
        methods=tuple(methods),
        partition=root.number if root is not None else 0,
        table=table.kind,
        partitions=volumes,
        filesystem=disk_filesystem.name,
        label=disk_filesystem.label,
    )


def _boot_info_of_filesystem(found: FileSystem) -> BootInfo:
    boot = None
    why = f"the disk is one file system ({found.name}), which cannot be a root file system"
    if found.name in ROOT_FILESYSTEMS:
        boot = BootMethod.KERNEL
        why = f"the disk is one file system ({found.name}): it boots with a separate kernel"
    return BootInfo(boot, why, (boot,) if boot else (), filesystem=found.name, label=found.label)


def _find_methods(disk_filesystem: FileSystem, table: PartitionTable) -> list[BootMethod]:
    kinds = {partition.kind for partition in table.partitions}
    if table.kind == "gpt":
        marked = BIOS_BOOT in kinds or any(partition.is_active for partition in table.partitions)
        bios = table.has_boot_code and marked
    else:
        bios = table.has_boot_code
    found = [BootMethod.BIOS] if bios or disk_filesystem.name == "iso9660" else []
    return [*found, BootMethod.UEFI] if ESP in kinds else found


def _find_root(volumes: tuple[Volume, ...]) -> Volume | None:
    """The partition that most likely has the root file system."""
    named = [volume for volume in volumes if volume.kind == LINUX_ROOT]
    known = [volume for volume in volumes if volume.filesystem in ROOT_FILESYSTEMS]
    typed = [volume for volume in volumes if volume.kind == LINUX and not volume.filesystem]
    candidates = named or known or typed
    return max(candidates, key=lambda volume: volume.size, default=None)


def _explain(
    methods: list[BootMethod], disk_filesystem: FileSystem, table: PartitionTable, root: Volume | None
) -> str:
    if disk_filesystem.name == "iso9660":
        return "a CD image that also boots as a disk"
    if not methods:
        return (
            f"a {table.kind} partition table without boot code or a Linux root"
            if table.kind
            else "neither a partition table nor a file system was found"
        )
    if methods[0] is BootMethod.BIOS:
        also = "; by UEFI as well" if BootMethod.UEFI in methods else ""
        named = f"{table.kind} partition table" if table.kind else "first sector"
        return f"{named} with boot code{also}"
    if methods[0] is BootMethod.UEFI:
        return f"{table.kind} partition table with an EFI system partition, no boot code for a BIOS"
    number = root.number if root is not None else 0
    return f"no boot code, no EFI system partition: a separate kernel boots partition {number}"


def _make_volume(read: ReadAt, partition: Partition) -> Volume:
    found = filesystems.detect_filesystem(read, partition.begin)
    return Volume(
        partition.number, partition.kind, partition.begin, partition.size, found.name, found.label
    )


def _pread(descriptor: int, offset: int, length: int) -> bytes:
    if offset + length >= 1 << 63:
        return b""
    return os.pread(descriptor, length, offset)
