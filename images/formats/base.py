"""What the parsers of all formats share: descriptions, limits, refusals, and bounded reading."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Final

from images.content import MAX_SIZE
from vmjobs.errors import Fault, ImageRejected, reason_of

SECTOR: Final = 512
MIB: Final = 1024 * 1024


class Format(StrEnum):
    """The formats that images come in. What is stored and booted is always raw."""

    RAW = "raw"
    QCOW2 = "qcow2"
    VMDK = "vmdk"
    VDI = "vdi"
    VHDX = "vhdx"


@dataclass(frozen=True)
class Limits:
    """What is refused for its size alone. All in bytes but ``expansion``.

    virtual_size: of the disk. metadata: read of one file in all, tables included.
    expansion: how many times its file's size a disk may need, once it needs ``expansion_floor``.
    """

    virtual_size: int = MAX_SIZE
    metadata: int = 160 * MIB
    expansion: int = 200
    expansion_floor: int = 1024 * MIB


@dataclass(frozen=True)
class Description:
    """What a file's header says, all of it checked.

    version: of the format, as people write it. virtual_size: bytes of the disk inside.
    file_size: bytes of the file. allocated: at most so many bytes of the disk are not zeros.
    unit: bytes that are allocated at once (cluster, grain, block); 1 for raw.
    features: what else there is to know, in words.
    """

    format: Format
    version: str
    virtual_size: int
    file_size: int
    allocated: int
    unit: int = 1
    features: tuple[str, ...] = field(default=())


def refusal(code: str, message: str, *, hint: str = "") -> ImageRejected:
    """The error that refuses an image. ``code`` is stable: ``error.faults[0].code``."""
    return ImageRejected(message, hint=hint, faults=(Fault("image", code, message),))


class Reader:
    """Reads from one open file, by offset, at most ``budget`` bytes in all.

    Nothing but this file is ever opened, and its position does not matter.
    """

    def __init__(self, descriptor: int, budget: int) -> None:
        found = os.fstat(descriptor)
        self._descriptor = descriptor
        self._left = budget
        self.size = found.st_size
        #: Bytes that the file needs on its disk: less than its size where it has holes.
        self.allocated = min(found.st_size, found.st_blocks * SECTOR)

    def read(self, offset: int, length: int, what: str) -> bytes:
        """Exactly ``length`` bytes at ``offset``; ``what`` names them in a refusal.

        Raises:
            ImageRejected: they are not all in the file, or the budget is spent.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise refusal(
                "truncated",
                f"{what} is said to be at byte {offset}, {length} bytes long, "
                f"but the file has {self.size} bytes: it is truncated or damaged",
            )
        self._left -= length
        if self._left < 0:
            raise refusal(
                "too_much_metadata",
                "the image has more tables than are looked at; convert it with larger clusters",
            )
        data = b"".join(self._pieces(offset, length))
        if len(data) != length:
            raise refusal("truncated", f"the file became shorter while {what} was read")
        return data

    def head(self, length: int) -> bytes:
        """The first ``length`` bytes, or all that there are."""
        return self.read(0, min(length, self.size), "the head")

    def tail(self, length: int) -> bytes:
        """The last ``length`` bytes, or all that there are."""
        length = min(length, self.size)
        return self.read(self.size - length, length, "the end")

    def _pieces(self, offset: int, length: int) -> Iterator[bytes]:
        while length > 0:
            try:
                piece = os.pread(self._descriptor, min(length, MIB), offset)
            except OSError as error:
                raise refusal("unreadable", f"the file cannot be read: {error.strerror}") from error
            if not piece:
                return
            offset += len(piece)
            length -= len(piece)
            yield piece


@contextmanager
def open_image(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading, unbuffered.

    Raises:
        ImageRejected: there is no such file, it cannot be read, or is a device, pipe or directory.
    """
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to must not wait for ever.
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
def opened(file: BinaryIO | Path, limits: Limits) -> Iterator[Reader]:
    """A reader for a regular file, given by path or open already (then it stays open).

    Raises:
        ImageRejected: as :func:`open_image`, or the file is empty.
    """
    if isinstance(file, Path):
        with open_image(file) as found:
            yield _reader(found.fileno(), limits)
        return
    _check_regular(file.fileno())
    yield _reader(file.fileno(), limits)


def _check_regular(descriptor: int) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise refusal("not_a_file", "an image is a regular file, not a device, a pipe or a directory")


def _reader(descriptor: int, limits: Limits) -> Reader:
    reader = Reader(descriptor, limits.metadata)
    if reader.size == 0:
        raise refusal("empty", "the file is empty")
    return reader


def check_disk(virtual_size: int, limits: Limits) -> None:
    """Refuse disks of no size, of an odd one, or of one over the limit."""
    if virtual_size == 0:
        raise refusal("no_size", "the disk inside has no size")
    if virtual_size % SECTOR:
        raise refusal("odd_size", f"the disk has {virtual_size} bytes, which is no number of sectors")
    if virtual_size > min(limits.virtual_size, MAX_SIZE):
        most = min(limits.virtual_size, MAX_SIZE)
        raise refusal(
            "disk_too_large",
            f"the disk inside has {virtual_size // MIB} MiB, and {most // MIB} MiB are allowed",
        )


def check_file(virtual_size: int, file_size: int) -> None:
    """Refuse files that are very much larger than the disk in them: what is it that they hold?"""
    if file_size > 2 * virtual_size + 1024 * MIB:
        raise refusal(
            "file_too_large",
            f"a file of {file_size // MIB} MiB for a disk of {virtual_size // MIB} MiB",
        )


def check_expansion(allocated: int, file_size: int, limits: Limits) -> None:
    """Refuse files that would become very much larger than they are."""
    if allocated > limits.expansion_floor and allocated > limits.expansion * file_size:
        raise refusal(
            "expands_too_much",
            f"a file of {file_size} bytes that unpacks to {allocated // MIB} MiB is taken for a bomb",
        )
