"""Sends a content to a repository: only missing chunks, several segments at once.

One thread reads and digests; for each batch of segments, it asks the repository which are missing.
Other threads read the missing chunks again (from the page cache), compress and send them. Each has at
most one packed segment in memory. Segments that were sent stay if the sender fails: the next attempt
asks again and sends the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from images.content import (
    CHUNK_BYTES,
    SEGMENT_BYTES,
    ContentLayout,
    chunk_lengths,
    digest_chunks,
    read_segment,
    segment_digest,
    zero_chunk_digest,
    zero_segment_digest,
)
from images.segment import encode_chunks
from images.store.files import FileMark, mark_of
from images.transfer.upload_state import FileDigestCache
from images.transfer.worker_threads import THREADS, run_tasks
from vmjobs.errors import Conflict, DigestMismatch, InvalidRequest, MissingChunks
from vmjobs.file_transfer import ContentReceiver

#: Segments in a batch: few at first, so that sending starts early.
FIRST_BATCH: Final = 2
MAX_BATCH: Final = 32
#: Interval of checks whether the push is cancelled, in seconds.
_CHECK_SECONDS: Final = 1.0
#: Attempts at the whole content, if the repository lost segments that it reported to have.
MAX_ATTEMPTS: Final = 3

#: Called with the bytes of content that are complete, and the bytes sent on the wire, so far.
TransferProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class _MissingSegment:
    """A segment that is missing. send: numbers of the chunks to send."""

    number: int
    digest: bytes
    chunk_digests: Sequence[bytes]
    send: frozenset[int]


class _Segments:
    """The segments of a file, each digested once; safe to share between threads."""

    def __init__(
        self,
        file: BinaryIO,
        size: int,
        digest_cache: FileDigestCache | None,
        layout: ContentLayout | None,
    ) -> None:
        self.file, self.size, self.layout = file, size, layout
        self._digest_cache = digest_cache
        self._buffer = bytearray(min(SEGMENT_BYTES, size))

    def length(self, number: int) -> int:
        return min(SEGMENT_BYTES, self.size - number * SEGMENT_BYTES)

    def digest_of(self, number: int, chunk_digests: Sequence[bytes]) -> bytes:
        return (
            segment_digest(chunk_digests) if chunk_digests else zero_segment_digest(self.length(number))
        )

    def chunk_digests(self, number: int) -> list[bytes]:
        """The digests of a segment's chunks; none for a hole. Not thread-safe."""
        count = len(chunk_lengths(self.length(number)))
        known = self._digest_cache.chunk_digests(number, count) if self._digest_cache else None
        if known is not None:
            return known
        data = read_segment(self.file, number, self.size, self._buffer)
        if data is None:
            return []
        found = digest_chunks(data)
        if self._digest_cache:
            self._digest_cache.save(number, found)
        return found

    def pack(self, number: int, chunk_digests: Sequence[bytes], send: frozenset[int]) -> bytearray:
        return encode_chunks(chunk_digests, self.length(number), self._read(number, sorted(send)))

    def _read(self, number: int, wanted: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        lengths = chunk_lengths(self.length(number))
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for chunk in wanted:
            piece = buffer[: lengths[chunk]]
            count = os.preadv(self.file.fileno(), [piece], number * SEGMENT_BYTES + chunk * CHUNK_BYTES)
            if count < len(piece):
                raise DigestMismatch("the file became shorter while it was read")
            yield chunk, piece


class _Push:
    """One transfer of a content."""

    def __init__(
        self,
        segments: _Segments,
        receiver: ContentReceiver,
        workers: int,
        on_progress: TransferProgress,
    ) -> None:
        self._segments = segments
        self._receiver = receiver
        self._workers = workers
        self._on_progress = on_progress
        self._done = self._sent = 0

    def run(self) -> list[bytes]:
        """Send the missing segments; returns the digests of all segments."""
        digests: list[bytes] = []
        sending = run_tasks(
            self._send,
            self._missing_segments(digests),
            lambda: self._report_progress(0, 0),
            _CHECK_SECONDS,
            threads=self._workers,
            waiting=MAX_BATCH,
        )
        with closing(sending):
            for segment, sent in sending:
                self._report_progress(self._segments.length(segment.number), sent)
        return digests

    def _missing_segments(self, digests: list[bytes]) -> Iterator[_MissingSegment]:
        """Yield the segments to send; append the digests of all segments to ``digests``."""
        count, size = -(-self._segments.size // SEGMENT_BYTES), FIRST_BATCH
        while len(digests) < count:
            first = len(digests)
            yield from self._find_missing(range(first, min(first + size, count)), digests)
            size = min(size * 2, MAX_BATCH)

    def _find_missing(self, batch: range, digests: list[bytes]) -> Iterator[_MissingSegment]:
        """Yield the segments of a batch to send; count others as done, and append all digests."""
        segments, length, layout = self._segments, self._segments.length, self._segments.layout
        chunk_digests: dict[int, list[bytes]] = {}
        if layout is None:
            chunk_digests = {number: segments.chunk_digests(number) for number in batch}
            digests += [segments.digest_of(number, chunk_digests[number]) for number in batch]
        else:
            digests += layout.segments[batch.start : batch.stop]
        nonzero = [number for number in batch if digests[number] != zero_segment_digest(length(number))]
        flags = self._receiver.missing_segments([digests[n] for n in nonzero]) if nonzero else []
        missing = [number for number, flag in zip(nonzero, flags, strict=True) if flag]
        self._report_progress(sum(map(length, batch)) - sum(map(length, missing)), 0)
        for number in missing if layout is not None else ():
            chunk_digests[number] = segments.chunk_digests(number)
            if segments.digest_of(number, chunk_digests[number]) != digests[number]:
                raise DigestMismatch(f"segment {number} of the file has changed")
        send = self._missing_chunks({number: chunk_digests[number] for number in missing})
        for number in missing:
            yield _MissingSegment(number, digests[number], chunk_digests[number], send[number])

    def _missing_chunks(
        self, chunk_digests: Mapping[int, Sequence[bytes]]
    ) -> dict[int, frozenset[int]]:
        """For each segment, the numbers of the chunks that the repository lacks."""
        nonzero = [
            (number, place, digest)
            for number, digests in chunk_digests.items()
            for place, (digest, length) in enumerate(
                zip(digests, chunk_lengths(self._segments.length(number)), strict=True)
            )
            if digest != zero_chunk_digest(length)
        ]
        flags = self._receiver.missing_chunks([digest for _, _, digest in nonzero]) if nonzero else []
        found: dict[int, set[int]] = {number: set() for number in chunk_digests}
        for (number, place, _), flag in zip(nonzero, flags, strict=True):
            if flag:
                found[number].add(place)
        return {number: frozenset(places) for number, places in found.items()}

    def _send(self, wanted: _MissingSegment) -> int:
        """Send a segment; returns the number of bytes sent."""
        body = self._segments.pack(wanted.number, wanted.chunk_digests, wanted.send)
        sent = len(body)
        try:
            self._receiver.put_segment(wanted.digest, body)
        except MissingChunks:
            # A garbage collection or an abandoned upload removed chunks since the question.
            body = self._segments.pack(
                wanted.number, wanted.chunk_digests, frozenset(range(len(wanted.chunk_digests)))
            )
            sent += len(body)
            self._receiver.put_segment(wanted.digest, body)
        return sent

    def _report_progress(self, done: int, sent: int) -> None:
        self._done += done
        self._sent += sent
        self._on_progress(min(self._done, self._segments.size), self._sent)


def send_content(
    path: Path,
    receiver: ContentReceiver,
    *,
    layout: ContentLayout | None = None,
    digest_cache: FileDigestCache | None = None,
    workers: int = THREADS,
    on_progress: TransferProgress = lambda _done, _sent: None,
) -> ContentLayout:
    """Send a file's bytes to a repository, and return their layout.

    Args:
        layout: of the file, if it is known. digest_cache: from an earlier attempt.

    Raises:
        InvalidRequest: the file cannot be read, is empty, or changed meanwhile.
        Unavailable, QuotaExceeded, StorageFull and others: from the repository.
    """
    try:
        with path.open("rb", buffering=0) as file:
            mark = mark_of(os.fstat(file.fileno()))
            if mark["size"] == 0:
                raise InvalidRequest(f"{path} is empty: there is nothing to send")
            segments = _Segments(file, mark["size"], digest_cache, layout)
            try:
                return _send_all(
                    segments, receiver, workers, on_progress, lambda: _check_unchanged(file, path, mark)
                )
            except (DigestMismatch, InvalidRequest):
                if digest_cache is not None:
                    digest_cache.clear()
                _check_unchanged(file, path, mark)  # a change of the file is the better explanation
                raise
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def _send_all(
    segments: _Segments,
    receiver: ContentReceiver,
    workers: int,
    on_progress: TransferProgress,
    check: Callable[[], None],
) -> ContentLayout:
    for attempt in range(1, MAX_ATTEMPTS + 1):
        found = ContentLayout(
            segments.size, tuple(_Push(segments, receiver, workers, on_progress).run())
        )
        check()
        try:
            receiver.put_content(found.digest, found.to_bytes())
        except MissingChunks:
            if attempt == MAX_ATTEMPTS:
                raise
            segments.layout = found
        else:
            return found
    raise AssertionError("unreachable")


def _check_unchanged(file: BinaryIO, path: Path, mark: FileMark) -> None:
    if mark_of(os.fstat(file.fileno())) != mark:
        raise Conflict(
            f"{path} changed while it was being pushed",
            hint="push it again when no program writes to it; a VM may still be running from it",
        )
