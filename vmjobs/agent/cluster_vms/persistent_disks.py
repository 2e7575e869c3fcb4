"""Persistent disks of one cluster VM, or of one machine of a gateway.

The directory is renamed into place with a formatted scratch disk, which is never formatted again. A
``kill -9`` before that leaves a directory of another name, which is made anew. So a scratch disk that
is missing later is lost, and is never silently replaced by an empty one.

The driver makes the root overlay when the VM first boots from an image, whose digest is part of its
name: an overlay is valid only on the image that it was made for. A marker file beside it records that
it exists: before each boot at the latest. From then on a missing overlay is lost as well.

Superblock: Linux ``Documentation/filesystems/ext4/super.rst``. UUID: RFC 9562, section 5.8.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Final
from uuid import UUID

from vmjobs.agent.vm.job_disk import create_blank_disk, make_file_system, round_up
from vmjobs.errors import HypervisorError
from vmjobs.fsync import sync_directory

SCRATCH_DISK: Final = "scratch.disk"
#: The root overlay in an earlier release.
_OLD_OVERLAY: Final = "root.overlay"

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


def root_overlay(directory: Path, image: str) -> Path:
    """The overlay of the VM's root file system. image: digest of the image below it."""
    return directory / f"root-{image.removeprefix('sha256:')[:16]}.overlay"


def _root_marker(overlay: Path) -> Path:
    """An empty file: the overlay existed, and was not empty."""
    return overlay.with_suffix(".made")


def check(directory: Path, owner: str, image: str) -> None:
    """Reject a lost disk, and a truncated or foreign scratch disk; change nothing.

    A file system that was not made here (by an earlier release, or by the guest's administrator) is
    left to the guest to check.

    Raises:
        HypervisorError: a disk is rejected; names the fault and the remedy.
    """
    record_root(directory, image)
    overlay = root_overlay(directory, image)
    if (marker := _root_marker(overlay)).exists() and not _size(overlay):
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


def record_root(directory: Path, image: str) -> None:
    """Record durably that the VM has a root overlay, if it has: it is never made anew then.

    An empty overlay does not count: its kernel was killed before the first write.
    """
    overlay = root_overlay(directory, image)
    old = directory / _OLD_OVERLAY
    if old.exists() and not overlay.exists():
        old.rename(overlay)
    marker = _root_marker(overlay)
    if marker.exists() or not _size(overlay):
        return
    with overlay.open("rb") as file:
        os.fsync(file.fileno())
    marker.touch(0o600)
    sync_directory(directory)


def remove_roots(directory: Path, keep: str) -> None:
    """Remove the root overlays of all images but ``keep``: from the others the VM starts anew."""
    kept = root_overlay(directory, keep)
    # Markers first: a kill in between leaves an overlay as it was.
    for pattern in ("root-*.made", "root-*.overlay"):
        for path in directory.glob(pattern):
            if path.stem != kept.stem:
                path.unlink(missing_ok=True)


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
