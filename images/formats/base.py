"""Shared parts of the format parsers: descriptions, limits, rejections, bounded reads."""

from __future__ import annotations

import os
import stat
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Final, Literal

from images.content import MAX_CONTENT_BYTES
from vmjobs.errors import Fault, ImageRejected, reason_of

SECTOR: Final = 512
MIB: Final = 1024 * 1024


class Format(StrEnum):
    """Formats of image files. Stored and booted images are always raw."""

    RAW = "raw"
    QCOW2 = "qcow2"
    VMDK = "vmdk"
    VDI = "vdi"
    VHDX = "vhdx"


@dataclass(frozen=True)
class ImageLimits:
    """The largest accepted sizes, all in bytes but ``expansion``.

    virtual_size: of the disk. metadata: the sum of all reads of one file, tables included.
    expansion: the largest ratio of allocated bytes to file size, once ``expansion_floor`` is exceeded.
    """

    virtual_size: int = MAX_CONTENT_BYTES
    metadata: int = 160 * MIB
    expansion: int = 200
    expansion_floor: int = 1024 * MIB


@dataclass(frozen=True)
class ImageDescription:
    """The checked contents of a file's header.

    version: of the format, as users write it. virtual_size: bytes of the disk inside.
    file_size: bytes of the file. allocated: the most bytes of the disk that are not zeros.
    unit: bytes per allocation unit (cluster, grain, block); 1 for raw.
    features: further properties, in words.
    """

    format: Format
    version: str
    virtual_size: int
    file_size: int
    allocated: int
    unit: int = 1
    features: tuple[str, ...] = field(default=())


def refusal(code: str, message: str, *, hint: str = "") -> ImageRejected:
    """Return the error that rejects an image. code: stable, ``error.faults[0].code``."""
    return ImageRejected(message, hint=hint, faults=(Fault("image", code, message),))


def unpack_array(data: bytes, typecode: Literal["I", "Q"], byteorder: str) -> array[int]:
    """Decode a table of unsigned numbers: ``I`` of 32 bits, ``Q`` of 64. byteorder: as in ``sys``."""
    numbers = array(typecode, data)
    if sys.byteorder != byteorder:
        numbers.byteswap()
    return numbers


class ImageReader:
    """Reads from one open file, by offset, at most ``limits.metadata`` bytes in all.

    It opens no other file, and ignores this file's position.
    """

    def __init__(self, descriptor: int, limits: ImageLimits) -> None:
        found = os.fstat(descriptor)
        self._descriptor = descriptor
        self._left = limits.metadata
        self.limits = limits
        self.size = found.st_size
        #: Bytes that the file uses on its disk: fewer than its size if it has holes.
        self.allocated = min(found.st_size, found.st_blocks * SECTOR)

    def read(self, offset: int, length: int, what: str) -> bytes:
        """Read exactly ``length`` bytes at ``offset``; ``what`` names them in errors.

        Raises:
            ImageRejected: the file is too short, or the budget is spent.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise refusal(
                "truncated",
                f"{what} should be at byte {offset}, {length} bytes long, "
                f"but the file has {self.size} bytes: it is truncated or damaged",
            )
        self._left -= length
        if self._left < 0:
            raise refusal(
                "too_much_metadata",
                "the image's tables are larger than allowed; convert it with larger clusters",
            )
        try:
            data = os.pread(self._descriptor, length, offset)
        except OSError as error:
            raise refusal("unreadable", f"the file cannot be read: {error.strerror}") from error
        if len(data) != length:
            raise refusal("truncated", f"the file was truncated while {what} was read")
        return data

    def head(self, length: int) -> bytes:
        """Read the first ``length`` bytes, or the whole file."""
        return self.read(0, min(length, self.size), "the head")

    def tail(self, length: int) -> bytes:
        """Read the last ``length`` bytes, or the whole file."""
        length = min(length, self.size)
        return self.read(self.size - length, length, "the end")


@contextmanager
def open_image(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading, unbuffered.

    Raises:
        ImageRejected: it does not exist, cannot be read, or is a device, pipe or directory.
    """
    try:
        # O_NONBLOCK: opening a pipe without a writer must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        why = reason_of(error)
        raise refusal("unreadable", f"cannot open {path}: {why}") from error
    try:
        _check_regular(descriptor)
        with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


@contextmanager
def open_reader(file: BinaryIO | Path, limits: ImageLimits) -> Iterator[ImageReader]:
    """Yield a reader for a regular file, given by path or already open (it stays open).

    Raises:
        ImageRejected: as :func:`open_image`, or the file is empty.
    """
    with open_image(file) if isinstance(file, Path) else nullcontext(file) as opened:
        _check_regular(opened.fileno())
        reader = ImageReader(opened.fileno(), limits)
        if reader.size == 0:
            raise refusal("empty", "the file is empty")
        yield reader


def _check_regular(descriptor: int) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise refusal("not_a_file", "an image must be a regular file, not a device, pipe or directory")


def check_disk(reader: ImageReader, virtual_size: int) -> None:
    """Reject disks whose size is zero, not a multiple of 512, or over the limit."""
    if virtual_size == 0:
        raise refusal("no_size", "the disk inside has no size")
    if virtual_size % SECTOR:
        raise refusal("odd_size", f"the disk has {virtual_size} bytes (expected a multiple of 512)")
    most = min(reader.limits.virtual_size, MAX_CONTENT_BYTES)
    if virtual_size > most:
        raise refusal(
            "disk_too_large",
            f"the disk inside has {virtual_size // MIB} MiB (at most {most // MIB} MiB are allowed)",
        )


def check_file(reader: ImageReader, virtual_size: int) -> None:
    """Reject files much larger than the disk in them, which must hold something else."""
    if reader.size > 2 * virtual_size + 1024 * MIB:
        raise refusal(
            "file_too_large",
            f"the file has {reader.size // MIB} MiB, "
            f"far more than its disk of {virtual_size // MIB} MiB",
        )


def describe(
    reader: ImageReader,
    format: Format,
    version: str,
    *features: str,
    virtual_size: int,
    units: int,
    unit: int,
) -> ImageDescription:
    """Describe an image whose tables are checked; units: those with data, of ``unit`` bytes each.

    Raises:
        ImageRejected: the file would expand to many times its size.
    """
    allocated, limits = min(units * unit, virtual_size), reader.limits
    if allocated > limits.expansion_floor and allocated > limits.expansion * reader.size:
        raise refusal(
            "expands_too_much",
            f"the file of {reader.size} bytes expands to {allocated // MIB} MiB, which is too much",
        )
    return ImageDescription(format, version, virtual_size, reader.size, allocated, unit, features)
