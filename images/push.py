"""Sends a content to a repository: only missing chunks, several segments at once.

One thread reads and digests; for each batch of segments, it asks the repository which are missing.
Other threads read the missing chunks again (from the page cache), compress and send them. Each has at
most one packed segment in memory. Segments that were sent stay if the sender fails: the next attempt
asks again and sends the rest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from images.content import (
    BLOCK,
    SEGMENT,
    Layout,
    block_digests,
    block_lengths,
    read_segment,
    segment_digest,
    zero_block,
    zero_segment,
)
from images.segment import pack_blocks
from vmjobs.errors import Conflict, DigestMismatch, InvalidRequest, MissingBlocks

WORKERS: Final = 4
#: Segments in a batch: few at first, so that sending starts early.
FIRST_BATCH: Final = 2
LAST_BATCH: Final = 32
#: Attempts at the whole content, if the repository lost segments that it reported to have.
ATTEMPTS: Final = 3

#: Called with the bytes of content that are complete, and the bytes sent on the wire, so far.
Moved = Callable[[int, int], None]


class Receiver(Protocol):
    """An open upload at a repository. Safe to share between threads."""

    def missing_segments(self, digests: Sequence[bytes]) -> list[bool]:
        """Whether each of these segments must be sent."""

    def missing_blocks(self, digests: Sequence[bytes]) -> list[bool]:
        """Whether each of these chunks must be sent."""

    def put_segment(self, digest: bytes, body: bytearray) -> bool:
        """Send a segment. Raises MissingChunks; DigestMismatch: a wrong chunk."""

    def put_content(self, digest: str, layout: bytes) -> None:
        """Send the layout of a content. Raises MissingChunks."""


class Memory(Protocol):
    """Chunk digests of a file's segments from an earlier attempt."""

    def blocks(self, number: int) -> list[bytes] | None:
        """The digests of a segment's chunks (none: a hole); ``None``: unknown."""

    def keep(self, number: int, blocks: Sequence[bytes]) -> None:
        """Store the digests of a segment's chunks."""

    def forget(self) -> None:
        """Discard all digests."""


@dataclass(frozen=True)
class _Wanted:
    """A segment that is missing. send: numbers of the chunks to send."""

    number: int
    digest: bytes
    blocks: Sequence[bytes]
    send: frozenset[int]


class _Segments:
    """The segments of a file, each digested once; safe to share between threads."""

    def __init__(self, file: BinaryIO, size: int, memory: Memory | None, layout: Layout | None) -> None:
        self.file, self.size, self.layout = file, size, layout
        self._memory = memory
        self._buffer = bytearray(min(SEGMENT, size))

    def length(self, number: int) -> int:
        return min(SEGMENT, self.size - number * SEGMENT)

    def digest_of(self, number: int, blocks: Sequence[bytes]) -> bytes:
        return segment_digest(blocks) if blocks else zero_segment(self.length(number))

    def blocks(self, number: int) -> list[bytes]:
        """The digests of a segment's chunks; none for a hole. Not thread-safe."""
        known = self._memory.blocks(number) if self._memory else None
        if known is not None:
            return known
        data = read_segment(self.file, number, self.size, self._buffer)
        found = [] if data is None else block_digests(data)
        if self._memory:
            self._memory.keep(number, found)
        return found

    def pack(self, number: int, blocks: Sequence[bytes], send: frozenset[int]) -> bytearray:
        return pack_blocks(blocks, self.length(number), self._read(number, sorted(send)))

    def _read(self, number: int, wanted: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
        lengths = block_lengths(self.length(number))
        buffer = memoryview(bytearray(BLOCK))
        for block in wanted:
            piece = buffer[: lengths[block]]
            count = os.preadv(self.file.fileno(), [piece], number * SEGMENT + block * BLOCK)
            if count < len(piece):
                raise DigestMismatch("the file became shorter while it was read")
            yield block, piece


class _Push:
    """One transfer of a content."""

    def __init__(self, segments: _Segments, receiver: Receiver, workers: int, moved: Moved) -> None:
        self._segments = segments
        self._receiver = receiver
        self._workers = workers
        self._moved = moved
        self._lock = threading.Lock()
        self._done = self._sent = 0

    def run(self) -> list[bytes]:
        """Send the missing segments; returns the digests of all segments."""
        digests: list[bytes] = []
        pending: set[Future[None]] = set()
        count = -(-self._segments.size // SEGMENT)
        size = FIRST_BATCH
        with ThreadPoolExecutor(self._workers, "push") as pool:
            try:
                while len(digests) < count:
                    first = len(digests)
                    batch = range(first, min(first + size, count))
                    size = min(size * 2, LAST_BATCH)
                    found, missing = self._look_into(batch)
                    digests += found
                    pending.update(pool.submit(self._send, wanted) for wanted in missing)
                    pending = self._look_at(pending, LAST_BATCH)
                self._look_at(pending, 0)
            finally:
                pool.shutdown(cancel_futures=True)
        return digests

    def _look_at(self, pending: set[Future[None]], allowed: int) -> set[Future[None]]:
        """Wait until at most ``allowed`` are pending; raise the error of a failure."""
        while True:
            finished = {future for future in pending if future.done()}
            for future in finished:
                future.result()
            pending = pending - finished
            if len(pending) <= allowed:
                return pending
            wait(pending, return_when="FIRST_COMPLETED")

    def _look_into(self, batch: range) -> tuple[list[bytes], list[_Wanted]]:
        """The digests of a batch, and the segments to send; counts others as done."""
        length, layout = self._segments.length, self._segments.layout
        blocks: dict[int, list[bytes]] = {}
        if layout is None:
            blocks = {number: self._segments.blocks(number) for number in batch}
            digests = [self._segments.digest_of(number, blocks[number]) for number in batch]
        else:
            digests = list(layout.segments[batch.start : batch.stop])
        solid = [
            (number, digest)
            for number, digest in zip(batch, digests, strict=True)
            if digest != zero_segment(length(number))
        ]
        flags = self._receiver.missing_segments([digest for _, digest in solid]) if solid else []
        missing = [pair for pair, flag in zip(solid, flags, strict=True) if flag]
        self._count(sum(length(n) for n in batch) - sum(length(n) for n, _ in missing), 0)
        for number, digest in missing if layout is not None else ():
            blocks[number] = self._segments.blocks(number)
            if self._segments.digest_of(number, blocks[number]) != digest:
                raise DigestMismatch(f"segment {number} of the file has changed")
        lacking = self._lacking({number: blocks[number] for number, _ in missing})
        return digests, [
            _Wanted(number, digest, blocks[number], lacking[number]) for number, digest in missing
        ]

    def _lacking(self, blocks: Mapping[int, Sequence[bytes]]) -> dict[int, frozenset[int]]:
        """For each segment, the numbers of the chunks that the repository lacks."""
        solid = [
            (number, place, digest)
            for number, digests in blocks.items()
            for place, (digest, length) in enumerate(
                zip(digests, block_lengths(self._segments.length(number)), strict=True)
            )
            if digest != zero_block(length)
        ]
        flags = self._receiver.missing_blocks([digest for _, _, digest in solid]) if solid else []
        found: dict[int, set[int]] = {number: set() for number in blocks}
        for (number, place, _), flag in zip(solid, flags, strict=True):
            if flag:
                found[number].add(place)
        return {number: frozenset(places) for number, places in found.items()}

    def _send(self, wanted: _Wanted) -> None:
        body = self._segments.pack(wanted.number, wanted.blocks, wanted.send)
        sent = len(body)
        try:
            self._receiver.put_segment(wanted.digest, body)
        except MissingBlocks:
            # A garbage collection or an abandoned upload removed chunks since the question.
            body = self._segments.pack(
                wanted.number, wanted.blocks, frozenset(range(len(wanted.blocks)))
            )
            sent += len(body)
            self._receiver.put_segment(wanted.digest, body)
        self._count(self._segments.length(wanted.number), sent)

    def _count(self, done: int, sent: int) -> None:
        with self._lock:
            self._done += done
            self._sent += sent
            self._moved(min(self._done, self._segments.size), self._sent)


def send_content(
    path: Path,
    receiver: Receiver,
    *,
    layout: Layout | None = None,
    memory: Memory | None = None,
    workers: int = WORKERS,
    moved: Moved = lambda _done, _sent: None,
) -> Layout:
    """Send a file's bytes to a repository, and return their layout.

    Args:
        layout: of the file, if it is known. digest_cache: from an earlier attempt.

    Raises:
        InvalidRequest: the file cannot be read, is empty, or changed meanwhile.
        Unavailable, QuotaExceeded, StorageFull and others: from the repository.
    """
    try:
        with path.open("rb", buffering=0) as file:
            mark = _mark(os.fstat(file.fileno()))
            if mark.size == 0:
                raise InvalidRequest(f"{path} is empty: there is nothing to send")
            segments = _Segments(file, mark.size, memory, layout)
            try:
                return _send_all(segments, receiver, workers, moved, lambda: _same(file, path, mark))
            except (DigestMismatch, InvalidRequest):
                if memory is not None:
                    memory.forget()
                _same(file, path, mark)  # a change of the file is the better explanation
                raise
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def _send_all(
    segments: _Segments,
    receiver: Receiver,
    workers: int,
    moved: Moved,
    check: Callable[[], None],
) -> Layout:
    for attempt in range(1, ATTEMPTS + 1):
        found = Layout(segments.size, tuple(_Push(segments, receiver, workers, moved).run()))
        check()
        try:
            receiver.put_content(found.digest, found.to_bytes())
        except MissingBlocks:
            if attempt == ATTEMPTS:
                raise
            segments.layout = found
        else:
            return found
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class Mark:
    """Attributes that change when a file's bytes change."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int


def _mark(status: os.stat_result) -> Mark:
    return Mark(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def mark_of(path: Path) -> Mark:
    """The attributes of a file. Raises OSError."""
    return _mark(path.stat())


def _same(file: BinaryIO, path: Path, mark: Mark) -> None:
    if _mark(os.fstat(file.fileno())) != mark:
        raise Conflict(
            f"{path} changed while it was being pushed",
            hint="push it again when no program writes to it; a VM may still be running from it",
        )
