"""Stores contents in a directory: sparse files, written atomically, verified on use."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

from images.content import (
    CONTENT_PREFIX,
    SEGMENT_BYTES,
    ContentLayout,
    compute_layout,
    digest_chunks,
    nonzero_ranges,
    read_segment,
    segment_digest,
    zero_segment_digest,
)
from images.manifest import Part
from images.store.files import (
    FileMark,
    mark_of,
    move_into_place,
    temporary,
    write_all,
    write_atomically,
)
from vmjobs.errors import DigestMismatch, InvalidRequest, NotFound
from vmjobs.file_clone import clone_file

_DIGEST: Final = re.compile(r"tree:[0-9a-f]{64}")


@dataclass(frozen=True)
class ContentFolder:
    """Contents below ``root``: ``contents/<2 hex digits>/<hex digits>`` and layouts.

    The layout file (``….layout``) appears before the content, so that each content that is here can
    be used at once.
    """

    root: Path

    def path(self, digest: str) -> Path:
        """Path of the content, which need not exist.

        Raises:
            NotFound: this is not a digest, and nothing else may become part of a path.
        """
        name = _hex_digits(digest)
        return self.root / "contents" / name[:2] / name

    def lock_path(self, digest: str) -> Path:
        """Path of the lock that a fetch of the content holds."""
        return self.root / "locks" / _hex_digits(digest)

    def partial(self, digest: str) -> Path:
        """Path of the partial file during a fetch."""
        return self.root / "partial" / _hex_digits(digest)

    def chunk_digests_path(self, digest: str) -> Path:
        """Path of the content's chunk digests, which need not exist."""
        return self.path(digest).with_suffix(".blocks")

    @property
    def temporary(self) -> Path:
        """Directory for files that are being written."""
        return self.root / "tmp"

    def put(self, data: bytes) -> Part:
        """Store bytes, unless they are here.

        Raises:
            InvalidRequest: there are none, and no part of an image may be empty.
        """
        view = memoryview(data)
        segments = (view[at : at + SEGMENT_BYTES] for at in range(0, len(data), SEGMENT_BYTES))
        with temporary(self.temporary) as (file, path):
            layout = _write_segments(file, len(data), segments, None)
            self.commit_file(file, path, layout)
        return Part(digest=layout.digest, size=layout.size)

    def add_file(self, source: Path | BinaryIO, on_write: Callable[[int], None] | None = None) -> Part:
        """Store a regular file without reading its holes.

        Where the file system supports clones, the copy shares the original's disk blocks.
        on_write: called with the number of bytes so far.

        Raises:
            InvalidRequest: it is empty or not a regular file. OSError: it cannot be read.
        """
        if isinstance(source, Path):
            with source.open("rb", buffering=0) as file:
                return self.add_file(cast(BinaryIO, file), on_write)
        status = os.fstat(source.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise InvalidRequest("cannot store the file: it is not a regular file")
        with temporary(self.temporary) as (target, path):
            if clone_file(source, target):
                layout = compute_layout(target, os.fstat(target.fileno()).st_size, on_write)
            else:
                buffer, count = bytearray(SEGMENT_BYTES), -(-status.st_size // SEGMENT_BYTES)
                segments = (read_segment(source, n, status.st_size, buffer) for n in range(count))
                layout = _write_segments(target, status.st_size, segments, on_write)
            self.commit_file(target, path, layout)
        return Part(digest=layout.digest, size=layout.size)

    def commit_file(self, file: BinaryIO, path: Path, layout: ContentLayout) -> None:
        """Make a temporary file the content of the given layout, without reading it.

        An existing file stays: VMs may run from it, and a push would see a new file as a change.

        Raises:
            InvalidRequest: the layout is empty.
        """
        if layout.size == 0:
            raise InvalidRequest("an empty file cannot be a part of an image")
        target = self.path(layout.digest)
        with suppress(FileNotFoundError):
            if self._read_mark(target) == mark_of(target.stat()):
                return
        write_atomically(_layout_path(target), layout.to_bytes(), self.temporary)
        move_into_place(file, path, target)
        self._write_mark(target, mark_of(target.stat()))

    def verify(
        self, digest: str, size: int | None = None, done: Callable[[int], None] | None = None
    ) -> Path:
        """Verify the content's bytes, and return the path of its file.

        A verified file is not read again while its inode, size and times stay the same: the start
        from a cached image must not take longer for a larger image.

        done: called with the number of bytes read, if the file is read.

        Raises:
            NotFound: it is not here. DigestMismatch: it is damaged.
        """
        path = self.path(digest)
        try:
            with path.open("rb", buffering=0) as file:
                mark = mark_of(os.fstat(file.fileno()))
                if size is not None and mark["size"] != size:
                    raise DigestMismatch(
                        f"{digest} ({path}) has {mark['size']} bytes instead of {size}"
                    )
                if self._read_mark(path) == mark:
                    return path
                layout = compute_layout(cast(BinaryIO, file), mark["size"], done)
        except FileNotFoundError:
            raise NotFound(f"there is no content {digest}") from None
        if layout.digest != digest:
            raise DigestMismatch(
                f"{digest} is damaged: {path} has the digest {layout.digest}",
                hint="remove the file and fetch or build the image again",
            )
        self._write_mark(path, mark)
        return path

    def layout(self, digest: str) -> ContentLayout:
        """The content's layout.

        Raises:
            NotFound: it is not here. DigestMismatch: it is damaged.
        """
        path = self.path(digest)
        if not path.exists():
            raise NotFound(f"there is no content {digest}")
        try:
            return ContentLayout.parse(_layout_path(path).read_bytes(), digest)
        except (FileNotFoundError, DigestMismatch):
            pass  # the content itself gives the layout
        with path.open("rb", buffering=0) as file:
            layout = compute_layout(cast(BinaryIO, file), os.fstat(file.fileno()).st_size)
        if layout.digest != digest:
            raise DigestMismatch(f"{digest} is damaged: {path} has the digest {layout.digest}")
        with suppress(OSError):
            write_atomically(_layout_path(path), layout.to_bytes(), self.temporary)
        return layout

    def has(self, digest: str) -> bool:
        """Whether the content is here (its bytes are not verified)."""
        return self.path(digest).is_file()

    def list(self) -> Iterator[str]:
        """Digests of the contents that are here (their bytes are not verified)."""
        for path in self.root.glob("contents/*/*"):
            if _DIGEST.fullmatch(f"{CONTENT_PREFIX}{path.name}"):
                yield f"{CONTENT_PREFIX}{path.name}"

    def remove(self, digest: str) -> None:
        """Remove a content, if it is here. Open files of it stay readable."""
        path = self.path(digest)
        companions = (_layout_path(path), self.chunk_digests_path(digest), self._mark_path(path))
        for name in (path, *companions):
            name.unlink(missing_ok=True)

    def drop_partial(self, digest: str) -> None:
        """Remove a content's partial file. The caller holds the content's lock."""
        path = self.partial(digest)
        for name in (path, path.with_suffix(".note"), path.with_suffix(".blocks")):
            name.unlink(missing_ok=True)

    def _read_mark(self, path: Path) -> FileMark | None:
        try:
            return cast(FileMark, json.loads(self._mark_path(path).read_bytes()))
        except (OSError, ValueError):
            return None

    def _write_mark(self, path: Path, mark: FileMark) -> None:
        # A read-only store (another owner's, a read-only mount) works as well; its contents are
        # then read at each use.
        with suppress(OSError):
            write_atomically(self._mark_path(path), json.dumps(mark).encode(), self.temporary)

    def _mark_path(self, path: Path) -> Path:
        return self.root / "verified" / path.name


def _hex_digits(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise NotFound(f"{digest!r} is not the digest of a content")
    return digest.removeprefix(CONTENT_PREFIX)


def _layout_path(path: Path) -> Path:
    return path.with_suffix(".layout")


def _write_segments(
    file: BinaryIO,
    size: int,
    segments: Iterable[memoryview | None],
    on_write: Callable[[int], None] | None,
) -> ContentLayout:
    """Write the segments of a content of ``size`` bytes (None: a hole); zeros become holes."""
    digests = []
    for number, data in enumerate(segments):
        begin, end = number * SEGMENT_BYTES, min((number + 1) * SEGMENT_BYTES, size)
        if data is None:
            digests.append(zero_segment_digest(end - begin))
        else:
            for start, stop in nonzero_ranges(data):
                write_all(file.fileno(), data[start:stop], begin + start)
            digests.append(segment_digest(digest_chunks(data)))
        if on_write is not None:
            on_write(end)
    os.ftruncate(file.fileno(), size)
    return ContentLayout(size, tuple(digests))
