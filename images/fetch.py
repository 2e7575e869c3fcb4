"""Fetches one content: copies what this node has, fetches the rest, and verifies all.

A partial file receives each segment at its offset, so that an interrupted fetch continues where it
stopped: after an orderly end a note lists the segments in the file; otherwise the next fetch reads
the file again. Chunks of zeros stay holes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, cast

from images.blockindex import BlockIndex, note_blocks
from images.content import (
    BLOCK,
    SEGMENT,
    Layout,
    block_digests,
    is_zero,
    read_segment,
    scan,
    segment_digest,
    zero_segment,
)
from images.files import write_all, write_atomically
from images.folder import ContentFolder, mark_of
from images.manifest import Part
from images.remote import ImageFetcher, SegmentSource
from images.room import Room, full, is_full
from images.workers import worked
from vmjobs.errors import DigestMismatch, NotFound, StorageFull

#: Interval of checks whether the fetch is cancelled, in seconds.
_LOOK_SECONDS: Final = 1.0


@dataclass
class ContentFetch:
    """Fetches one content into a store. The caller of :meth:`run` holds its lock.

    on_progress: called with the number of completed bytes; an exception from it ends the fetch.
    """

    folder: ContentFolder
    room: Room
    fetch: ImageFetcher
    image: str
    part: Part
    step: Callable[[int], None]
    layout: Layout = field(init=False)
    #: Segments that the file has.
    _have: set[int] = field(default_factory=set)
    #: Segments where the file has wrong bytes: zeros must be written there, too.
    _dirty: set[int] = field(default_factory=set)
    #: The file for the digests of the chunks.
    _beside: BinaryIO = field(init=False)

    def run(self) -> None:
        """Fetch the content into the store.

        Raises:
            NotFound, Unavailable: from the fetcher; the partial file stays.
            DigestMismatch: fetched bytes have a wrong digest.
            StorageFull: no space is left; the partial file is removed.
        """
        digest = self.part.digest
        self.layout = Layout.parse(self.fetch.layout(self.image, digest), digest)
        if self.layout.size != self.part.size:
            raise DigestMismatch(f"{digest} has {self.layout.size} bytes instead of {self.part.size}")
        path = self.folder.partial(digest)
        with _opened(path) as file, _opened(path.with_suffix(".blocks")) as self._beside:
            os.ftruncate(file.fileno(), self.layout.size)
            self._recall(file)
            with self._noting(file):
                self._copy_local(file)
                self._fetch_rest(file)
                self.folder.adopt(file, path, self.layout)
        path.with_suffix(".blocks").replace(self.folder.blocks_path(digest))
        self._note_path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ earlier fetches

    def _recall(self, file: BinaryIO) -> None:
        """Find the segments that an earlier fetch left in the file."""
        try:
            note = json.loads(self._note_path.read_bytes())
            if note["mark"] == mark_of(os.fstat(file.fileno())):
                self._have.update(note["have"])
                self._dirty.update(note["dirty"])
                return
        except (OSError, ValueError, KeyError, TypeError):
            pass
        finally:
            self._note_path.unlink(missing_ok=True)
        done = 0
        for number, blocks in scan(file, self.layout.size):
            length = self.layout.length(number)
            found = zero_segment(length) if blocks is None else segment_digest(blocks)
            if found == self.layout.segments[number]:
                self._have.add(number)
            elif blocks is not None:
                self._dirty.add(number)
            done += length if number in self._have else 0
            self.step(done)

    @contextmanager
    def _noting(self, file: BinaryIO) -> Iterator[None]:
        """Note the state of an unfinished file; remove it if the disk is full."""
        try:
            yield
        except StorageFull:
            self.folder.drop_partial(self.part.digest)
            raise
        except OSError as error:
            if not is_full(error):
                raise
            self.folder.drop_partial(self.part.digest)
            raise full(error) from error
        except BaseException:
            with suppress(OSError):  # without the note, the next fetch reads the file again
                self._write_note(file)
            raise

    def _write_note(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())  # a note must not survive a crash that loses the file's data
        note = {
            "mark": mark_of(os.fstat(file.fileno())),
            "have": sorted(self._have),
            "dirty": sorted(self._dirty),
        }
        write_atomically(self._note_path, json.dumps(note).encode(), self.folder.temporary)

    @property
    def _note_path(self) -> Path:
        return self.folder.partial(self.part.digest).with_suffix(".note")

    def _missing(self) -> dict[bytes, list[int]]:
        """Missing segments: maps each digest to the numbers of its segments."""
        found: dict[bytes, list[int]] = {}
        for number, digest in enumerate(self.layout.segments):
            if number not in self._have:
                found.setdefault(digest, []).append(number)
        return found

    # ------------------------------------------------------------------ local copies

    def _copy_local(self, file: BinaryIO) -> None:
        """Copy segments from other contents of this node, damaged ones included."""
        missing = self._missing()
        for length in {self.layout.length(number) for number in range(len(self.layout.segments))}:
            for number in missing.pop(zero_segment(length), ()):
                if number in self._dirty:
                    self._write(file, number, bytes(length))
                self._have.add(number)
        for content in list(self.folder.list()) if missing else ():
            for digest, data, blocks in self._found_in(content, missing):
                self._place(file, missing.pop(digest, ()), data, blocks)

    def _found_in(
        self, content: str, missing: Mapping[bytes, object]
    ) -> Iterator[tuple[bytes, memoryview, list[bytes]]]:
        """Yield missing segments from another content, verified, with chunk digests."""
        buffer = bytearray(SEGMENT)
        with suppress(NotFound, DigestMismatch, FileNotFoundError):  # damaged, or evicted meanwhile
            layout = self.folder.layout(content)
            wanted = [(n, digest) for n, digest in enumerate(layout.segments) if digest in missing]
            with self.folder.path(content).open("rb", buffering=0) as raw:
                for number, digest in wanted:
                    try:
                        data = read_segment(cast(BinaryIO, raw), number, layout.size, buffer)
                    except OSError:
                        continue  # a disk error, or the file became shorter
                    blocks = [] if data is None else block_digests(data)
                    if data is not None and segment_digest(blocks) == digest:
                        yield digest, data, blocks

    # ------------------------------------------------------------------ the repository

    def _fetch_rest(self, file: BinaryIO) -> None:
        missing = self._missing()
        if not missing:
            return
        folder = self.folder
        here = ((folder.path(content), folder.blocks_path(content)) for content in folder.list())
        source = SegmentSource(self.fetch, self.image, BlockIndex(here))

        def get(digest: bytes) -> tuple[bytes, list[bytes]]:
            return source.get(digest, self.layout.length(missing[digest][0]))

        with closing(worked(get, list(missing), self._tell, _LOOK_SECONDS)) as segments:
            for digest, (data, blocks) in segments:
                self._place(file, missing[digest], data, blocks)

    # ------------------------------------------------------------------ writing

    def _place(
        self, file: BinaryIO, numbers: Sequence[int], data: bytes | memoryview, blocks: Sequence[bytes]
    ) -> None:
        """Write a verified segment to each of its places."""
        for number in numbers:
            self._write(file, number, data)
            note_blocks(self._beside.fileno(), number, blocks)
            self._have.add(number)
            self._tell()

    def _write(self, file: BinaryIO, number: int, data: bytes | memoryview) -> None:
        runs = list(_runs(data, zeros=number in self._dirty))
        self.room.claim(sum(end - begin for begin, end in runs))
        view = memoryview(data)
        for begin, end in runs:
            self._put(file, view[begin:end], number * SEGMENT + begin)
        self._dirty.discard(number)

    def _put(self, file: BinaryIO, data: memoryview, offset: int) -> None:
        """Write, and evict images while the disk is full."""
        while True:
            try:
                write_all(file.fileno(), data, offset)
                return
            except OSError as error:
                if not is_full(error) or not self.room.make():
                    raise

    def _tell(self) -> None:
        self.step(min(len(self._have) * SEGMENT, self.layout.size))


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        yield cast(BinaryIO, file)


def _runs(data: bytes | memoryview, *, zeros: bool) -> Iterator[tuple[int, int]]:
    """Yield begin and end (bytes) of ranges to write: chunks that are not all zeros."""
    view, start = memoryview(data), 0
    for begin in range(0, len(view), BLOCK):
        if not zeros and is_zero(view[begin : begin + BLOCK]):
            if start < begin:
                yield start, begin
            start = begin + BLOCK
    if start < len(view):
        yield start, len(view)
