"""Decompress a fetched layer to its tar archive, and check the digests of both."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

import zstandard

from images.oci.container import Descriptor
from vmjobs.errors import DigestMismatch, ImageRejected, StorageFull

_CHUNK: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
#: The largest zstd window that is accepted, in bytes: a decoder needs that much memory.
_WINDOW: Final = 128 * 1024 * 1024


@dataclass
class UnpackBudget:
    """How much a container image may still unpack. size: bytes; entries: of all kinds."""

    size: int = 64 * 1024**3
    entries: int = 2_000_000

    def spend(self, size: int = 0, entries: int = 0) -> None:
        """Subtract from it.

        Raises:
            ImageRejected: not enough is left.
        """
        self.size -= size
        self.entries -= entries
        if self.size < 0:
            raise ImageRejected("the container image is too large when unpacked")
        if self.entries < 0:
            raise ImageRejected("the container image has too many files")


class _HashingReader(io.RawIOBase):
    """Reads a file and computes the digest of its bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.size = 0

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read into ``buffer``."""
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self.sha256.update(data)
        self.size += len(data)
        return len(data)

    def drain(self) -> None:
        """Read to the end."""
        while self.read(_CHUNK):
            pass


def unpack(blob: Path, layer: Descriptor, diff_id: str, target: Path, budget: UnpackBudget) -> None:
    """Write the tar archive of a layer (gzip, zstd or neither) to ``target``.

    Raises:
        DigestMismatch: the blob is not ``layer``, or the archive is not ``diff_id``.
        ImageRejected: it is damaged or too large. StorageFull: there is no space for it.
    """
    try:
        with blob.open("rb") as file, target.open("wb") as sink:
            source = _HashingReader(file)
            found = _copy(_opened(file, source), sink, budget)
            source.drain()
    except FileNotFoundError:
        raise ImageRejected(f"layer {layer.digest} is missing") from None
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise ImageRejected(f"layer {layer.digest} is damaged: {error}") from error
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StorageFull(f"no space to unpack layer {layer.digest}") from error
        raise
    if source.sha256.hexdigest() != layer.digest.removeprefix("sha256:"):
        raise DigestMismatch(f"layer {layer.digest} is damaged: its bytes have another digest")
    if found != diff_id:
        raise DigestMismatch(f"layer {layer.digest} unpacks to {found}, the image says {diff_id}")


def _opened(file: BinaryIO, source: _HashingReader) -> BinaryIO:
    head = file.read(4)
    file.seek(0)
    if head.startswith(_GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=cast(BinaryIO, source), mode="rb"))
    if head == _ZSTD:
        decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        return cast(
            BinaryIO,
            decoder.stream_reader(cast(BinaryIO, source), read_across_frames=True, closefd=False),
        )
    return cast(BinaryIO, source)


def _copy(source: BinaryIO, sink: BinaryIO, budget: UnpackBudget) -> str:
    digest = hashlib.sha256()
    while data := source.read(_CHUNK):
        budget.spend(size=len(data))
        digest.update(data)
        sink.write(data)
    return f"sha256:{digest.hexdigest()}"
