"""Contents in a directory: flat sparse files, written whole or not at all, checked when read."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

from images.content import (
    BLOCK,
    PREFIX,
    SEGMENT,
    SEGMENT_BLOCKS,
    Layout,
    block_digest,
    is_zero,
    layout_of,
    read_segment,
    segment_digest,
    zero_block,
    zero_segment,
)
from images.files import keep, remove_leftovers, temporary, write_all, write_atomically
from vmjobs.errors import DigestMismatch, InvalidRequest, NotFound

_CHUNK: Final = 1 << 20
_DIGEST: Final = re.compile(r"tree:[0-9a-f]{64}")
#: ioctl_ficlone(2): have one file share another's blocks.
_FICLONE: Final = 0x40049409


class SparseWriter(io.RawIOBase):
    """Writes to a file, leaving holes for zeros, and works out the layout on the way.

    At most one block is held in memory. on_write: called with the bytes written so far.
    """

    def __init__(self, file: BinaryIO, on_write: Callable[[int], None] | None = None) -> None:
        self._descriptor = file.fileno()
        self._on_write = on_write
        self._rest = bytearray()
        self._blocks: list[bytes] = []
        self._segments: list[bytes] = []
        self.size = 0

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Take the next bytes."""
        view = memoryview(data).cast("B")
        length = len(view)
        if self._rest:
            missing = BLOCK - len(self._rest)
            self._rest += view[:missing]
            view = view[missing:]
            if len(self._rest) == BLOCK:
                self._block(bytes(self._rest))
                self._rest.clear()
        while len(view) >= BLOCK:
            self._block(view[:BLOCK])
            view = view[BLOCK:]
        self._rest += view
        if self._on_write is not None:
            self._on_write(self.size + len(self._rest))
        return length

    def hole(self, length: int) -> None:
        """Take a segment of ``length`` zeros. What was written ended with a segment."""
        self._segments.append(zero_segment(length))
        self.size += length
        if self._on_write is not None:
            self._on_write(self.size)

    def finish(self) -> Layout:
        """Give the file its size, even where it ends in a hole, and return the layout."""
        if self._rest:
            self._block(bytes(self._rest))
            self._rest.clear()
        if self._blocks:
            self._end_segment()
        os.ftruncate(self._descriptor, self.size)
        return Layout(self.size, tuple(self._segments))

    def _block(self, data: bytes | memoryview) -> None:
        if is_zero(data):
            self._blocks.append(zero_block(len(data)))
        else:
            self._blocks.append(block_digest(data))
            write_all(self._descriptor, data, self.size)
        self.size += len(data)
        if len(self._blocks) == SEGMENT_BLOCKS:
            self._end_segment()

    def _end_segment(self) -> None:
        self._segments.append(segment_digest(self._blocks))
        self._blocks.clear()


class Incoming:
    """A content on its way into a folder."""

    def __init__(
        self,
        folder: ContentFolder,
        file: BinaryIO,
        path: Path,
        on_write: Callable[[int], None] | None,
    ) -> None:
        self._folder, self._file, self._path = folder, file, path
        self.sink = SparseWriter(file, on_write)

    @property
    def stream(self) -> BinaryIO:
        """Where to write the bytes."""
        return cast(BinaryIO, self.sink)

    def commit(self) -> tuple[str, int]:
        """Make the content appear; returns its digest and size in bytes.

        Raises:
            InvalidRequest: nothing was written; no part of an image is empty.
        """
        layout = self.sink.finish()
        self._folder.adopt(self._file, self._path, layout)
        return layout.digest, layout.size


@dataclass(frozen=True)
class ContentFolder:
    """Contents below ``root``: ``contents/<2 hex digits>/<hex digits>``, each with its layout.

    The layout (``….layout``) is there before the content, so that a content that is there can
    be used at once.
    """

    root: Path

    def path(self, digest: str) -> Path:
        """Where the content is or would be.

        Raises:
            NotFound: this is no digest, and nothing else may become part of a path.
        """
        name = _hex(digest)
        return self.root / "contents" / name[:2] / name

    def lock(self, digest: str) -> Path:
        """The lock of who fetches the content."""
        return self.root / "locks" / _hex(digest)

    def partial(self, digest: str) -> Path:
        """Where the content is while it is fetched."""
        return self.root / "partial" / _hex(digest)

    def blocks_path(self, digest: str) -> Path:
        """Where the digests of the content's blocks are, if they were noted."""
        return self.path(digest).with_suffix(".blocks")

    @property
    def temporary(self) -> Path:
        """Where files are that nobody may read yet."""
        return self.root / "tmp"

    def remove_leftovers(self) -> None:
        """Remove what writers that are gone left behind."""
        remove_leftovers(self.temporary)

    @contextmanager
    def receive(self, on_write: Callable[[int], None] | None = None) -> Iterator[Incoming]:
        """A content to be written; it is there only after :meth:`Incoming.commit`."""
        with temporary(self.temporary) as (file, path):
            yield Incoming(self, file, path, on_write)

    def put(self, stream: BinaryIO) -> tuple[str, int]:
        """Store what ``stream`` gives; returns its digest and size. Having it already is fine.

        Raises:
            InvalidRequest: it gives nothing.
        """
        with self.receive() as incoming:
            while piece := stream.read(_CHUNK):
                incoming.sink.write(piece)
            return incoming.commit()

    def add_file(
        self, source: Path | BinaryIO, on_write: Callable[[int], None] | None = None
    ) -> tuple[str, int]:
        """Store a regular file, its holes not even read; returns its digest and size.

        What shares its blocks with the original where the file system can do that takes no room.

        Raises:
            InvalidRequest: it is empty or no regular file. OSError: it cannot be read.
        """
        if isinstance(source, Path):
            with source.open("rb", buffering=0) as file:
                return self.add_file(cast(BinaryIO, file), on_write)
        status = os.fstat(source.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest("what is to be stored is not a regular file")
        with temporary(self.temporary) as (target, path):
            if _clone(source, target):
                layout = layout_of(target, os.fstat(target.fileno()).st_size, on_write)
            else:
                layout = _copy(source, status.st_size, SparseWriter(target, on_write))
            self.adopt(target, path, layout)
        return layout.digest, layout.size

    def adopt(self, file: BinaryIO, path: Path, layout: Layout) -> None:
        """Make a temporary file the content that its layout describes; its bytes are not read.

        One that is here already stays: VMs may run from it, and to a push a new file is a change.

        Raises:
            InvalidRequest: it is empty.
        """
        if layout.size == 0:
            raise InvalidRequest("an empty file cannot be a part of an image")
        target = self.path(layout.digest)
        with suppress(FileNotFoundError):
            if self._seen(target) == mark_of(target.stat()):
                return
        write_atomically(_layout_path(target), layout.to_bytes(), self.temporary)
        keep(file, path, target)
        self._note(target, mark_of(target.stat()))

    def verified(
        self, digest: str, size: int | None = None, done: Callable[[int], None] | None = None
    ) -> Path:
        """The content's file, once its bytes are known to be right.

        A file that was found right is not read again while its inode, size and change time stay:
        starting from a cached image must not take longer the larger it is.

        done: called with the bytes that were read, where they are.

        Raises:
            NotFound: it is not here. DigestMismatch: its bytes are others than they were.
        """
        path = self.path(digest)
        try:
            with path.open("rb", buffering=0) as file:
                mark = mark_of(os.fstat(file.fileno()))
                if size is not None and mark["size"] != size:
                    raise DigestMismatch(
                        f"{digest} ({path}) has {mark['size']} bytes instead of {size}"
                    )
                if self._seen(path) == mark:
                    return path
                layout = layout_of(cast(BinaryIO, file), mark["size"], done)
        except FileNotFoundError:
            raise NotFound(f"there is no content {digest}") from None
        if layout.digest != digest:
            raise DigestMismatch(
                f"{digest} is damaged: {path} has the digest {layout.digest}",
                hint="remove the file and fetch or build the image again",
            )
        self._note(path, mark)
        return path

    def layout(self, digest: str) -> Layout:
        """The content's layout.

        Raises:
            NotFound: it is not here. DigestMismatch: it is damaged.
        """
        path = self.path(digest)
        if not path.exists():
            raise NotFound(f"there is no content {digest}")
        try:
            return Layout.parse(_layout_path(path).read_bytes(), digest)
        except (FileNotFoundError, DigestMismatch):
            pass  # it can be had of the content itself
        with path.open("rb", buffering=0) as file:
            layout = layout_of(cast(BinaryIO, file), os.fstat(file.fileno()).st_size)
        if layout.digest != digest:
            raise DigestMismatch(f"{digest} is damaged: {path} has the digest {layout.digest}")
        with suppress(OSError):
            write_atomically(_layout_path(path), layout.to_bytes(), self.temporary)
        return layout

    def has(self, digest: str) -> bool:
        """True if the content is here (its bytes are not looked at)."""
        return self.path(digest).is_file()

    def list(self) -> Iterator[str]:
        """Digests of the contents that are here (their bytes are not looked at)."""
        for path in self.root.glob("contents/*/*"):
            if _DIGEST.fullmatch(f"{PREFIX}{path.name}"):
                yield f"{PREFIX}{path.name}"

    def remove(self, digest: str) -> None:
        """Remove a content; that it is not here is no error. Who has it open keeps it."""
        path = self.path(digest)
        beside = (_layout_path(path), self.blocks_path(digest), self._note_path(path))
        for name in (path, *beside):
            name.unlink(missing_ok=True)

    def drop_partial(self, digest: str) -> None:
        """Remove what was fetched so far of a content. The caller holds its lock."""
        path = self.partial(digest)
        for name in (path, path.with_suffix(".note"), path.with_suffix(".blocks")):
            name.unlink(missing_ok=True)

    def _seen(self, path: Path) -> dict[str, int] | None:
        try:
            return cast(dict[str, int], json.loads(self._note_path(path).read_bytes()))
        except (OSError, ValueError):
            return None

    def _note(self, path: Path, mark: dict[str, int]) -> None:
        # A store that can only be read (not ours, a read-only mount) works as well; its contents
        # are then read each time.
        with suppress(OSError):
            write_atomically(self._note_path(path), json.dumps(mark).encode(), self.temporary)

    def _note_path(self, path: Path) -> Path:
        return self.root / "verified" / path.name


def _hex(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise NotFound(f"{digest!r} is not the digest of a content")
    return digest.removeprefix(PREFIX)


def _layout_path(path: Path) -> Path:
    return path.with_suffix(".layout")


def mark_of(status: os.stat_result) -> dict[str, int]:
    """What changes with a file's bytes."""
    return {
        "inode": status.st_ino,
        "size": status.st_size,
        "changed": status.st_ctime_ns,
        "modified": status.st_mtime_ns,
    }


def _clone(source: BinaryIO, target: BinaryIO) -> bool:
    try:
        fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError:
        return False  # another file system, or one that cannot
    return True


def _copy(source: BinaryIO, size: int, sink: SparseWriter) -> Layout:
    buffer = bytearray(SEGMENT)
    for number in range(-(-size // SEGMENT)):
        data = read_segment(source, number, size, buffer)
        if data is None:
            sink.hole(min(SEGMENT, size - number * SEGMENT))
        else:
            sink.write(data)
    return sink.finish()
