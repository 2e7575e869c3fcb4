"""Converts images between raw and other formats with qemu-img in a sandbox.

The canonical form of a disk is raw: the same disk has the same bytes, and so the same content digest,
from every format. qemu-img never detects a format: it gets its file as ``json:`` with every driver
named and no backing file. It sees only that file and an empty directory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

from images.formats import Format, ImageDescription, ImageLimits, inspect, refusal_of_raw
from images.formats.base import MIB, open_image, open_reader, refusal
from images.formats.signatures import HEAD, TAIL
from images.inspect import sandbox
from images.inspect.sandbox import SandboxLimits
from vmjobs.errors import DISK_FULL_ERRNOS, StorageFull, VMJobsError
from vmjobs.fsync import sync_directory

#: Called with the completed fraction, from 0 to 1.
FractionCallback = Callable[[float], None]

_PERCENT: Final = re.compile(rb"\(\s*(\d+(?:\.\d+)?)/100%\)")
_EXTRA_BYTES: Final = 256 * MIB
_OUTPUT_NAME: Final = "disk"
_OUTPUT: Final = f"{sandbox.OUTPUT}/{_OUTPUT_NAME}"
_FORMATS_WITH_BACKING_FILE: Final = frozenset({Format.QCOW2, Format.VMDK})


def to_raw(
    source: Path,
    description: ImageDescription,
    sink: Path,
    progress: FractionCallback | None = None,
) -> None:
    """Convert ``source`` to a raw, sparse file ``sink``, replacing an existing one.

    Args:
        description: result of :func:`inspect_image`; the file is inspected again,
            and must not have changed.
        progress: called from time to time.

    Raises:
        ImageRejected: the file changed, is damaged, or the conversion reached a limit.
        Unavailable: there is no sandbox here.
        StorageFull: no space for the result.
    """
    with open_image(source) as file, _output_directory(sink) as directory:
        _check_same(file, description)
        limits = _limits(description.virtual_size, description.allocated)
        _check_free_space(directory, description.allocated)
        _convert(file, description.format, directory, ("-O", "raw"), limits, progress)
        with _open_output(directory) as result:
            # Some versions of qemu-img omit zeros at the end.
            result.truncate(description.virtual_size)
            _check_not_image(result)


def from_raw(
    source: Path,
    format: Format,
    sink: Path,
    progress: FractionCallback | None = None,
    *,
    compressed: bool = False,
) -> None:
    """Convert the raw disk ``source`` to another format in ``sink``, replacing it.

    compressed: for qcow2 (zlib) and vmdk (streamOptimized) only. Raises as :func:`to_raw` does.
    """
    with open_image(source) as file, _output_directory(sink) as directory:
        description = inspect(file, Format.RAW)
        size = description.virtual_size
        # The format's tables add to the size; the largest block size of a format is 32 MiB.
        limits = _limits(size + size // 8 + 64 * MIB, size + size // 8)
        options = _target_options(format, compressed=compressed)
        _convert(file, Format.RAW, directory, options, limits, progress)


def read_head(source: Path, description: ImageDescription, length: int) -> bytes:
    """The first bytes of the disk, at most 64 MiB. Raises as :func:`to_raw` does."""
    length = min(length, description.virtual_size, 64 * MIB)
    if description.format is Format.RAW:
        with open_image(source) as file:
            return file.read(length)
    with tempfile.TemporaryDirectory(prefix="vmjobs-") as scratch, open_image(source) as file:
        _check_same(file, description)
        words = (f"if={_source_json(description.format)}", f"of={_OUTPUT}")
        sandbox.run(
            ("qemu-img", "dd", "-O", "raw", f"bs={MIB}", f"count={-(-length // MIB)}", *words),
            source=file,
            output=Path(scratch),
            limits=_limits(length, length),
        )
        with _open_output(Path(scratch)) as result:
            head = result.read(length)
    if message := refusal_of_raw(head[:HEAD], description.virtual_size):
        raise refusal("raw_with_header", f"the image does not contain a plain disk: {message}")
    return head


def _convert(
    file: BinaryIO,
    format: Format,
    directory: Path,
    options: tuple[str, ...],
    limits: SandboxLimits,
    progress: FractionCallback | None,
) -> None:
    show = progress or (lambda _: None)
    seen = bytearray()

    def on_output(data: bytes) -> None:
        seen.extend(data)
        if found := _PERCENT.findall(seen):
            show(min(1.0, float(found[-1]) / 100))
            del seen[: seen.rfind(b")") + 1]
        del seen[:-256]

    sandbox.run(
        ("qemu-img", "convert", "-p", *options, _source_json(format), _OUTPUT),
        source=file,
        output=directory,
        limits=limits,
        on_output=on_output,
    )
    show(1.0)


def _source_json(format: Format) -> str:
    """The source in QEMU's ``json:`` syntax: each driver by name, and no other file."""
    node: dict[str, object] = {
        "driver": str(format),
        "file": {"driver": "file", "filename": sandbox.SOURCE, "locking": "off"},
    }
    if format in _FORMATS_WITH_BACKING_FILE:
        node["backing"] = None
    return f"json:{json.dumps(node)}"


def _target_options(format: Format, *, compressed: bool) -> tuple[str, ...]:
    if compressed and format not in (Format.QCOW2, Format.VMDK):
        raise refusal("not_compressible", f"{format} has no compressed form (expected qcow2 or vmdk)")
    if format is Format.VMDK:
        kind = "streamOptimized" if compressed else "monolithicSparse"
        return ("-O", "vmdk", "-o", f"subformat={kind}")
    return ("-O", str(format), *(("-c",) if compressed else ()))


def _limits(file_size: int, written: int) -> SandboxLimits:
    """Limits on a program whose result has these bytes; written: those that are not zeros."""
    # Some file systems reserve twice the space for a file while it grows.
    most = min(file_size, 2 * written) + _EXTRA_BYTES
    return SandboxLimits(file_size=file_size + MIB, written=most)


def _check_same(file: BinaryIO, description: ImageDescription) -> None:
    limits = ImageLimits(virtual_size=description.virtual_size)
    found = inspect(file, description.format, limits)
    if description.format is Format.RAW:
        # The file system may change the size of a file's holes without a write.
        found = replace(found, allocated=description.allocated)
    if found != description:
        raise refusal("changed", "the image changed after its inspection")


def _check_not_image(result: BinaryIO) -> None:
    """Refuse a disk that is itself an image: in a raw file, QEMU would probe it."""
    with open_reader(result, ImageLimits()) as reader:
        message = refusal_of_raw(reader.head(HEAD), reader.size, reader.tail(TAIL))
    if message:
        raise refusal("raw_with_header", f"the image does not contain a plain disk: {message}")


@contextmanager
def _output_directory(sink: Path) -> Iterator[Path]:
    """A directory beside ``sink`` for the output; on success, it replaces ``sink``."""
    try:
        directory = Path(tempfile.mkdtemp(prefix=f".{sink.name[:64]}.", dir=sink.parent))
    except OSError as error:
        raise _to_error(error, sink) from error
    try:
        yield directory
        with _open_output(directory) as file:
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            os.fsync(file.fileno())
        (directory / _OUTPUT_NAME).replace(sink)
        sync_directory(sink.parent)
    except OSError as error:
        raise _to_error(error, sink) from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _open_output(directory: Path) -> Iterator[BinaryIO]:
    """The sandboxed program's output file: a regular file without other hard links."""
    descriptor = os.open(
        directory / _OUTPUT_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    )
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise refusal("conversion_failed", "the conversion's result is not a separate regular file")
        yield file


def _umask() -> int:
    """The process's umask, read without changing it for other threads."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077


def _check_free_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise StorageFull(
            f"the disk needs up to {needed // MIB} MiB, and {free // MIB} MiB are free "
            f"in {directory.parent}"
        )


def _to_error(error: OSError, sink: Path) -> VMJobsError:
    if error.errno in DISK_FULL_ERRNOS:
        return StorageFull(f"no space is left for {sink}")
    return refusal("unwritable", f"cannot write {sink}: {error.strerror}")
