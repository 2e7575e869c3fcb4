"""Persistent disks of one cluster VM, or of one machine of a gateway.

The directory is renamed into place with a formatted scratch disk, which is never formatted again. A
``kill -9`` before that leaves a directory of another name, which is made anew. So a scratch disk that
is missing later is lost, and is never silently replaced by an empty one.

The driver makes the root overlay when the VM first boots. A marker file beside it records that it
exists: before each boot at the latest, so also for an overlay of an earlier release. From then on a
missing overlay is lost as well.

Superblock: Linux ``Documentation/filesystems/ext4/super.rst``. UUID: RFC 9562, section 5.8.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import UUID

from vmjobs.agent.vm.job_disk import create_blank_disk, make_file_system, round_up
from vmjobs.errors import HypervisorError
from vmjobs.fsync import sync_directory

#: The scratch disk, and the overlay of the VM's root file system.
SCRATCH_DISK: Final = "scratch.disk"
ROOT_OVERLAY: Final = "root.overlay"
#: An empty file: a non-empty overlay existed.
ROOT_MARKER: Final = "root.made"

_SUPERBLOCK_AT, _SUPERBLOCK_SIZE = 1024, 1024
_MAGIC, _64BIT = b"\x53\xef", 0x80
#: The first six bytes of the UUIDs of our file systems.
_UUID_PREFIX: Final = b"vmjobs"


def make(directory: Path, owner: str, size: int) -> None:
    """Make the directory with an empty ext4 scratch disk in it, unless it exists.

    Args:
        owner: the id of the VM that the disks belong to.
        size: minimum size of the scratch disk in bytes.

    Raises:
        HypervisorError: mke2fs is not installed, or fails.
    """
    if os.path.lexists(directory):  # perhaps a link to another disk, which is not mounted now
        return
    fresh = directory.with_name(f"{directory.name}.new")
    if fresh.exists():
        shutil.rmtree(fresh)
    fresh.mkdir(mode=0o700)
    disk = fresh / SCRATCH_DISK
    create_blank_disk(disk, size)
    make_file_system(disk, "has_journal", "-U", str(_uuid(owner)))
    with disk.open("rb") as file:
        os.fsync(file.fileno())
    sync_directory(fresh)
    fresh.rename(directory)
    sync_directory(directory.parent)


def check(directory: Path, owner: str) -> None:
    """Reject a lost disk, and a truncated or foreign scratch disk; change nothing.

    A file system that was not made here (by an earlier release, or by the guest's administrator) is
    left to the guest to check.

    Raises:
        HypervisorError: a disk is rejected; names the fault and the remedy.
    """
    record_root(directory)
    if (marker := directory / ROOT_MARKER).exists() and not _size(overlay := directory / ROOT_OVERLAY):
        remedy = f"restore it from a backup, or remove {marker} to start again from the image"
        raise HypervisorError(f"the persistent disk {overlay} is missing or empty: {remedy}")
    disk = directory / SCRATCH_DISK
    remedy = f"restore it from a backup, or remove {directory} to start with an empty one"
    try:
        with disk.open("rb") as file:
            actual = os.fstat(file.fileno()).st_size
            file.seek(_SUPERBLOCK_AT)
            superblock = file.read(_SUPERBLOCK_SIZE)
    except FileNotFoundError:
        raise HypervisorError(f"the persistent disk {disk} is missing: {remedy}") from None
    if len(superblock) < _SUPERBLOCK_SIZE or superblock[0x38:0x3A] != _MAGIC:
        return
    uuid = superblock[0x68:0x78]
    if uuid.startswith(_UUID_PREFIX) and uuid != _uuid(owner).bytes:
        raise HypervisorError(f"the persistent disk {disk} is another VM's: {remedy}")
    if actual < (expected := _file_system_size(superblock)):
        raise HypervisorError(
            f"the persistent disk {disk} was truncated to {actual} of {expected} bytes: {remedy}"
        )


def grow(directory: Path, size: int) -> None:
    """Enlarge the scratch disk to at least ``size`` bytes; its guest enlarges the file system.

    A larger disk stays as it is.
    """
    with (directory / SCRATCH_DISK).open("r+b") as file:
        if os.fstat(file.fileno()).st_size < size:
            file.truncate(round_up(size))
            os.fsync(file.fileno())


def record_root(directory: Path) -> None:
    """Record durably that the VM has a root overlay, if it has: it is never made anew then.

    An empty overlay does not count: its kernel was killed before the first write.
    """
    overlay, marker = directory / ROOT_OVERLAY, directory / ROOT_MARKER
    if marker.exists() or not _size(overlay):
        return
    with overlay.open("rb") as file:
        os.fsync(file.fileno())
    marker.touch(0o600)
    sync_directory(directory)


def remove_root(directory: Path) -> None:
    """Remove the root overlay, so that the VM starts with a new one."""
    # Marker first: a kill in between leaves the overlay as it was.
    (directory / ROOT_MARKER).unlink(missing_ok=True)
    (directory / ROOT_OVERLAY).unlink(missing_ok=True)
    drop_stored_roots(directory)


def store_root(directory: Path, label: str) -> None:
    """Store the root overlay under a label, so that the VM starts with a new one."""
    (directory / ROOT_MARKER).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        (directory / ROOT_OVERLAY).rename(directory / f"{ROOT_OVERLAY}.{label}")
    sync_directory(directory)


def take_stored_root(directory: Path, label: str) -> None:
    """Make the stored overlay of this label the root overlay, if there is one, and no other overlay."""
    stored, overlay = directory / f"{ROOT_OVERLAY}.{label}", directory / ROOT_OVERLAY
    if stored.exists() and not overlay.exists():
        stored.rename(overlay)
        sync_directory(directory)


def drop_stored_roots(directory: Path) -> None:
    """Remove all stored root overlays."""
    for stored in directory.glob(f"{ROOT_OVERLAY}.*"):
        stored.unlink(missing_ok=True)


def _size(file: Path) -> int:
    """Return the size of a file in bytes; 0: there is none."""
    return file.stat().st_size if file.exists() else 0


def _file_system_size(superblock: bytes) -> int:
    low, shift, features, high = (
        int.from_bytes(superblock[at : at + 4], "little") for at in (0x4, 0x18, 0x60, 0x150)
    )
    if not features & _64BIT:
        high = 0
    return (high << 32 | low) << (10 + min(shift, 6))


def _uuid(owner: str) -> UUID:
    """Return the UUID of an owner's file system: version 8, in a format of our own."""
    value = bytearray(_UUID_PREFIX + hashlib.sha256(owner.encode()).digest()[:10])
    value[6] = value[6] & 0x0F | 0x80
    value[8] = value[8] & 0x3F | 0x80
    return UUID(bytes=bytes(value))
