"""Decompress a fetched layer to its tar archive, and check the digests of both."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

import zstandard

from images.oci.container import Descriptor
from vmjobs.errors import DISK_FULL_ERRNOS, DigestMismatch, ImageRejected, StorageFull

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


def unpack(blob: Path, layer: Descriptor, diff_id: str, target: Path, budget: UnpackBudget) -> None:
    """Write the tar archive of a layer (gzip, zstd or neither) to ``target``.

    Raises:
        DigestMismatch: the blob is not ``layer``, or the archive is not ``diff_id``.
        ImageRejected: it is damaged or too large. StorageFull: there is no space for it.
    """
    try:
        with blob.open("rb") as file, target.open("wb") as sink:
            if hashlib.file_digest(file, "sha256").hexdigest() != layer.digest.removeprefix("sha256:"):
                raise DigestMismatch(f"layer {layer.digest} is damaged: its bytes have another digest")
            found = _copy(_decompressed(file), sink, budget)
    except FileNotFoundError:
        raise ImageRejected(f"layer {layer.digest} is missing") from None
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise ImageRejected(f"layer {layer.digest} is damaged: {error}") from error
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise StorageFull(f"no space to unpack layer {layer.digest}") from error
        raise
    if found != diff_id:
        raise DigestMismatch(f"layer {layer.digest} unpacks to {found}, the image says {diff_id}")


def _decompressed(file: BinaryIO) -> BinaryIO:
    file.seek(0)
    head = file.read(4)
    file.seek(0)
    if head.startswith(_GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if head == _ZSTD:
        decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        return cast(BinaryIO, decoder.stream_reader(file, read_across_frames=True, closefd=False))
    return file


def _copy(source: BinaryIO, sink: BinaryIO, budget: UnpackBudget) -> str:
    digest = hashlib.sha256()
    while data := source.read(_CHUNK):
        budget.spend(size=len(data))
        digest.update(data)
        sink.write(data)
    return f"sha256:{digest.hexdigest()}"
