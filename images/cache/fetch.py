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
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, cast

from images.cache.eviction import CacheEviction, raise_storage_full
from images.chunk_index import ChunkIndex, write_chunk_digests
from images.content import (
    SEGMENT_BYTES,
    ContentLayout,
    digest_chunks,
    iter_segments,
    nonzero_ranges,
    read_segment,
    segment_digest,
    zero_segment_digest,
)
from images.manifest import Part
from images.store.content_folder import ContentFolder
from images.store.files import exclusive_lock, mark_of, write_all, write_atomically
from images.transfer.remote import ImageFetcher, SegmentSource
from images.transfer.worker_threads import run_tasks
from vmjobs.errors import DISK_FULL_ERRNOS, DigestMismatch, NotFound, StorageFull

#: Interval of checks whether the fetch is cancelled, in seconds.
_CHECK_SECONDS: Final = 1.0


@dataclass
class ContentFetch:
    """Fetches one content into a store.

    on_progress: called with the number of completed bytes; an exception from it ends the fetch.
    """

    folder: ContentFolder
    eviction: CacheEviction
    fetch: ImageFetcher
    image: str
    part: Part
    on_progress: Callable[[int], None]
    layout: ContentLayout = field(init=False)
    #: Segments that the file has.
    _present: set[int] = field(default_factory=set)
    #: Segments where the file has wrong bytes: zeros must be written there, too.
    _dirty: set[int] = field(default_factory=set)
    #: The file for the digests of the chunks.
    _digest_file: BinaryIO = field(init=False)

    def run(self) -> None:
        """Fetch the content into the store unless it is there, or wait until another fetch has.

        Raises:
            NotFound, Unavailable: from the fetcher; the partial file stays.
            DigestMismatch: fetched bytes have a wrong digest.
            StorageFull: no space is left; the partial file is removed.
        """
        lock_path = self.folder.lock_path(self.part.digest)
        with exclusive_lock(lock_path, waiting=partial(self.on_progress, 0)):
            self.run_locked()

    def run_locked(self) -> None:
        """As :meth:`run`, for a caller that holds the content's lock."""
        try:
            self.folder.verify(self.part.digest, self.part.size, self.on_progress)
        except (NotFound, DigestMismatch):
            self._fetch()

    def _fetch(self) -> None:
        digest = self.part.digest
        self.layout = ContentLayout.parse(self.fetch.layout(self.image, digest), digest)
        if self.layout.size != self.part.size:
            raise DigestMismatch(f"{digest} has {self.layout.size} bytes instead of {self.part.size}")
        path = self.folder.partial(digest)
        with (
            _open_for_update(path) as file,
            _open_for_update(path.with_suffix(".blocks")) as self._digest_file,
        ):
            os.ftruncate(file.fileno(), self.layout.size)
            self._load_note(file)
            with self._keep_note(file):
                self._copy_local(file)
                self._fetch_rest(file)
                self.folder.commit_file(file, path, self.layout)
        path.with_suffix(".blocks").replace(self.folder.chunk_digests_path(digest))
        self._note_path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ earlier fetches

    def _load_note(self, file: BinaryIO) -> None:
        """Find the segments that an earlier fetch left in the file."""
        try:
            note = json.loads(self._note_path.read_bytes())
            if note["mark"] == mark_of(os.fstat(file.fileno())):
                self._present.update(note["have"])
                self._dirty.update(note["dirty"])
                return
        except (OSError, ValueError, KeyError, TypeError):
            pass
        finally:
            self._note_path.unlink(missing_ok=True)
        done = 0
        for number, chunk_digests in iter_segments(file, self.layout.size):
            length = self.layout.length(number)
            found = (
                zero_segment_digest(length) if chunk_digests is None else segment_digest(chunk_digests)
            )
            if found == self.layout.segments[number]:
                self._present.add(number)
            elif chunk_digests is not None:
                self._dirty.add(number)
            done += length if number in self._present else 0
            self.on_progress(done)

    @contextmanager
    def _keep_note(self, file: BinaryIO) -> Iterator[None]:
        """Note the state of an unfinished file; remove it if the disk is full."""
        try:
            with raise_storage_full():
                yield
        except StorageFull:
            self.folder.drop_partial(self.part.digest)
            raise
        except OSError:
            raise  # without a note: an error of the disk may have damaged the file
        except BaseException:
            with suppress(OSError):  # without the note, the next fetch reads the file again
                self._write_note(file)
            raise

    def _write_note(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())  # a note must not survive a crash that loses the file's data
        note = {
            "mark": mark_of(os.fstat(file.fileno())),
            "have": sorted(self._present),
            "dirty": sorted(self._dirty),
        }
        write_atomically(self._note_path, json.dumps(note).encode(), self.folder.temporary)

    @property
    def _note_path(self) -> Path:
        return self.folder.partial(self.part.digest).with_suffix(".note")

    def _missing_segments(self) -> dict[bytes, list[int]]:
        """Missing segments: maps each digest to the numbers of its segments."""
        found: dict[bytes, list[int]] = {}
        for number, digest in enumerate(self.layout.segments):
            if number not in self._present:
                found.setdefault(digest, []).append(number)
        return found

    # ------------------------------------------------------------------ local copies

    def _copy_local(self, file: BinaryIO) -> None:
        """Copy segments from other contents of this node, damaged ones included."""
        missing = self._missing_segments()
        for length in {self.layout.length(number) for number in range(len(self.layout.segments))}:
            for number in missing.pop(zero_segment_digest(length), ()):
                if number in self._dirty:
                    self._write_ranges(file, number, bytes(length))
                self._present.add(number)
        for content in list(self.folder.list()) if missing else ():
            for digest, data, chunk_digests in self._read_missing_from(content, missing):
                self._write_segment(file, missing.pop(digest, ()), data, chunk_digests)

    def _read_missing_from(
        self, content: str, missing: Mapping[bytes, object]
    ) -> Iterator[tuple[bytes, memoryview, list[bytes]]]:
        """Yield missing segments from another content, verified, with chunk digests."""
        buffer = bytearray(SEGMENT_BYTES)
        with suppress(NotFound, DigestMismatch, FileNotFoundError):  # damaged, or evicted meanwhile
            layout = self.folder.layout(content)
            wanted = [(n, digest) for n, digest in enumerate(layout.segments) if digest in missing]
            with self.folder.path(content).open("rb", buffering=0) as raw:
                for number, digest in wanted:
                    try:
                        data = read_segment(cast(BinaryIO, raw), number, layout.size, buffer)
                    except OSError:
                        continue  # a disk error, or the file became shorter
                    chunk_digests = [] if data is None else digest_chunks(data)
                    if data is not None and segment_digest(chunk_digests) == digest:
                        yield digest, data, chunk_digests

    # ------------------------------------------------------------------ the repository

    def _fetch_rest(self, file: BinaryIO) -> None:
        missing = self._missing_segments()
        if not missing:
            return
        source = self._segment_source()

        def get(digest: bytes) -> tuple[bytes, list[bytes]]:
            return source.get(digest, self.layout.length(missing[digest][0]))

        with closing(run_tasks(get, list(missing), self._report_progress, _CHECK_SECONDS)) as segments:
            for digest, (data, chunk_digests) in segments:
                self._write_segment(file, missing[digest], data, chunk_digests)

    def _segment_source(self) -> SegmentSource:
        folder = self.folder
        files = ((folder.path(c), folder.chunk_digests_path(c)) for c in folder.list())
        return SegmentSource(self.fetch, self.image, ChunkIndex(files))

    # ------------------------------------------------------------------ writing

    def _write_segment(
        self,
        file: BinaryIO,
        numbers: Sequence[int],
        data: bytes | memoryview,
        chunk_digests: Sequence[bytes],
    ) -> None:
        """Write a verified segment to each of its places."""
        for number in numbers:
            self._write_ranges(file, number, data)
            write_chunk_digests(self._digest_file.fileno(), number, chunk_digests)
            self._present.add(number)
            self._report_progress()

    def _write_ranges(self, file: BinaryIO, number: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        runs = [(0, len(data))] if number in self._dirty else list(nonzero_ranges(view))
        self.eviction.ensure_free(sum(end - begin for begin, end in runs))
        for begin, end in runs:
            self._write_evicting(file, view[begin:end], number * SEGMENT_BYTES + begin)
        self._dirty.discard(number)

    def _write_evicting(self, file: BinaryIO, data: memoryview, offset: int) -> None:
        """Write, and evict images while the disk is full."""
        while True:
            try:
                write_all(file.fileno(), data, offset)
                return
            except OSError as error:
                if error.errno not in DISK_FULL_ERRNOS or not self.eviction.evict_one():
                    raise

    def _report_progress(self) -> None:
        self.on_progress(min(len(self._present) * SEGMENT_BYTES, self.layout.size))


@contextmanager
def _open_for_update(path: Path) -> Iterator[BinaryIO]:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        yield cast(BinaryIO, file)
