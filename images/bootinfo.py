"""How a disk may boot, by what its first sectors say: a suggestion, for people to overrule.

Nothing is mounted and nothing is run; some kilobytes are read, and no content is an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from images import filesystems, partitions
from images.filesystems import ROOTS, FileSystem, Read
from images.partitions import BIOS_BOOT, ESP, LINUX, LINUX_ROOT, Partition, Table
from vmjobs.model import BootMethod


@dataclass(frozen=True)
class Volume:
    """A partition with the file system in it. begin, size: bytes."""

    number: int
    kind: str
    begin: int
    size: int
    filesystem: str
    label: str


@dataclass(frozen=True)
class BootInfo:
    """What a disk is, as far as one sees without booting it.

    boot: how it should be booted; ``None``: no way was found. methods: all ways that were found,
        the best first. partition: of the root file system, for ``kernel``; 0: the disk itself is one.
    table: ``gpt``, ``mbr`` or ``""``. filesystem, label: of one that begins at the disk's begin.
    why: a sentence.
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
        """Whether there is anything on it that a disk has."""
        return bool(self.table or self.filesystem or self.methods)


def boot_of(file: Path | BinaryIO) -> BootInfo:
    """How the raw disk in ``file`` may boot. Raises OSError where it cannot be read."""
    if isinstance(file, Path):
        with file.open("rb", buffering=0) as opened:
            return boot_of(opened)
    descriptor = file.fileno()
    return suggest(lambda offset, length: _pread(descriptor, offset, length))


def boot_of_bytes(head: bytes) -> BootInfo:
    """The same of a disk of which only the first bytes are at hand, some MiB."""
    return suggest(lambda offset, length: head[offset : offset + length])


def suggest(read: Read) -> BootInfo:
    """The same of a disk that is read by a function."""
    whole, table = filesystems.look(read), partitions.look(read)
    if whole.name and whole.name != "iso9660":
        return _of_filesystem(whole)
    volumes = tuple(_volume(read, partition) for partition in table.partitions)
    methods = list(_methods(whole, table))
    root = _root(volumes)
    if root is not None:
        methods.append(BootMethod.KERNEL)
    return BootInfo(
        boot=methods[0] if methods else None,
        why=_why(methods, whole, table, root),
        methods=tuple(methods),
        partition=root.number if root is not None else 0,
        table=table.kind,
        partitions=volumes,
        filesystem=whole.name,
        label=whole.label,
    )


def _of_filesystem(whole: FileSystem) -> BootInfo:
    if whole.name in ROOTS:
        why = f"the disk itself is a file system ({whole.name}): a kernel beside it boots it"
        boot = BootMethod.KERNEL
        return BootInfo(boot, why, (boot,), filesystem=whole.name, label=whole.label)
    why = f"the disk itself is {whole.name}, which no system has its root on"
    return BootInfo(None, why, filesystem=whole.name, label=whole.label)


def _methods(whole: FileSystem, table: Table) -> list[BootMethod]:
    kinds = {partition.kind for partition in table.partitions}
    if table.kind == "gpt":
        marked = BIOS_BOOT in kinds or any(partition.active for partition in table.partitions)
        bios = table.code and marked
    else:
        bios = table.code
    found = [BootMethod.BIOS] if bios or whole.name == "iso9660" else []
    return [*found, BootMethod.UEFI] if ESP in kinds else found


def _root(volumes: tuple[Volume, ...]) -> Volume | None:
    """The partition that the root file system is most likely on."""
    named = [volume for volume in volumes if volume.kind == LINUX_ROOT]
    known = [volume for volume in volumes if volume.filesystem in ROOTS]
    typed = [volume for volume in volumes if volume.kind == LINUX and not volume.filesystem]
    candidates = named or known or typed
    return max(candidates, key=lambda volume: volume.size, default=None)


def _why(methods: list[BootMethod], whole: FileSystem, table: Table, root: Volume | None) -> str:
    if whole.name == "iso9660":
        return "a CD image that boots as a disk too"
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
    return f"no boot code, no EFI system partition: a kernel beside it boots partition {number}"


def _volume(read: Read, partition: Partition) -> Volume:
    found = filesystems.look(read, partition.begin)
    return Volume(
        partition.number, partition.kind, partition.begin, partition.size, found.name, found.label
    )


def _pread(descriptor: int, offset: int, length: int) -> bytes:
    if offset + length >= 1 << 63:
        return b""
    return os.pread(descriptor, length, offset)
