"""Fetches a content while VMs read it: reads come first, the rest when reads pause.

It uses the same partial file and notes as any other fetch, so that each kind continues where the
other stopped. A read fetches pieces of :data:`WINDOW_CHUNKS`, a range of a stored segment: a guest
that boots reads little, but from nearly every segment (docs/lazy-start.md).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import BinaryIO, Final, cast

from images.cache.fetch import ContentFetch
from images.chunk_index import write_chunk_digests
from images.content import CHUNK_BYTES, CHUNKS_PER_SEGMENT, SEGMENT_BYTES, is_zero
from images.segment import SegmentHeader
from images.store.files import try_exclusive_lock
from images.transfer.remote import SegmentSource
from vmjobs.errors import InvalidRequest, Unavailable

log = logging.getLogger(__name__)

#: Chunks that are fetched for a read (256 KiB): 64 KiB would take twice as many requests, 1 MiB three
#: times as many bytes.
WINDOW_CHUNKS: Final = 4
#: Most windows in one request, for the rest and for sequential reads: another read may have to wait
#: for that request.
BATCH_WINDOWS: Final = 4
#: Segments whose headers are fetched before the first read, which then takes one request less.
PREFETCHED_HEADERS: Final = 256
#: Seconds without a waiting read after which the rest is fetched; and seconds between small parts of
#: the rest while reads go on.
QUIET_SECONDS: Final = 0.5
TRICKLE_SECONDS: Final = 5.0
#: How long the rest waits for the guest to be ready, in seconds.
HOLD_SECONDS: Final = 60.0
#: Interval of attempts while the repository is unreachable, in seconds.
RETRY_SECONDS: Final = 1.0

#: Called with the error that makes an image unusable for a VM that runs from it.
FailureCallback = Callable[[Exception], object]

_WINDOWS_PER_SEGMENT: Final = CHUNKS_PER_SEGMENT // WINDOW_CHUNKS


@dataclass
class LazyFetch(ContentFetch):
    """A fetch in a thread of its own, whose file VMs read meanwhile.

    It goes on without readers, so that the content becomes complete, unless the repository is
    unreachable then.

    patience: seconds for which a read waits for an unreachable repository.
    """

    patience: float = 1800.0
    thread: threading.Thread = field(init=False)
    #: Number of VMs that read the file.
    readers: int = 0
    #: Set once the file may be read, is complete, or has failed.
    settled: threading.Event = field(default_factory=threading.Event)
    #: The error that ended the fetch for its readers.
    failure: Exception | None = None
    _listeners: list[FailureCallback] = field(default_factory=list)
    #: Whether the file may be read, through :meth:`ensure` and :attr:`file`.
    is_readable: bool = False
    file: BinaryIO = field(init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    #: Windows that a thread is fetching; the header of each partial segment, and a bit for each
    #: chunk of it that is in the file.
    _claimed: set[int] = field(default_factory=set)
    _headers: dict[int, SegmentHeader] = field(default_factory=dict)
    _present_chunks: dict[int, int] = field(default_factory=dict)
    #: Segments in which chunks of zeros must be written.
    _dirty_at_start: frozenset[int] = frozenset()
    _source: SegmentSource = field(init=False)
    _has_ended: bool = False
    #: All segments before this one are in the file.
    _first_missing: int = 0
    _waiting_reads: int = 0
    _held_until: float = 0.0
    _last_read: float = 0.0
    _last_request: float = 0.0
    _waiting_since: float = 0.0
    _waited: float = 0.0

    def run(self) -> None:
        """As :meth:`ContentFetch.run`, but return at once if another fetch is under way."""
        with try_exclusive_lock(self.folder.lock_path(self.part.digest)) as locked:
            if locked:
                self.run_locked()
                log.info("the root disk %s is complete", self.part.digest)

    # ------------------------------------------------------------------ for readers

    def ensure(self, offset: int, length: int) -> bool:
        """Return once these bytes are in the file; whether the content is complete.

        Raises:
            InvalidRequest: the content has no such bytes.
            Exception: :attr:`failure`.
        """
        if not 0 <= offset <= offset + length <= self.layout.size:
            raise InvalidRequest(f"cannot read {length} bytes at {offset}: beyond the content's end")
        chunks = range(offset // CHUNK_BYTES, -(-(offset + length) // CHUNK_BYTES))
        if any(not self._has_chunk(chunk) for chunk in chunks):
            with self._count_read():
                for window in sorted({chunk // WINDOW_CHUNKS for chunk in chunks}):
                    self._ensure_window(window)
        with self._changed:
            return len(self._present) == len(self.layout.segments)

    def fetch_rest_now(self) -> None:
        """Fetch the rest from now on: the guest is ready."""
        with self._changed:
            self._held_until = 0.0
            self._changed.notify_all()

    def is_waiting(self) -> bool:
        """Whether a read is waiting."""
        return self._waiting_reads > 0

    def waited(self) -> float:
        """Seconds for which reads have waited so far."""
        with self._changed:
            now = time.monotonic() - self._waiting_since if self._waiting_reads else 0.0
            return self._waited + now

    @contextmanager
    def report_failure(self, failed: FailureCallback) -> Iterator[None]:
        """Call ``failed`` with the error, from any thread, if the fetch fails while the context lasts.

        Raises:
            Exception: the fetch has failed already.
        """
        with self._changed:
            if self.failure is not None:
                raise self.failure
            self._listeners.append(failed)
        try:
            yield
        finally:
            with self._changed:
                self._listeners.remove(failed)

    def fail(self, error: Exception) -> None:
        """End the fetch and all waits with an error. Only the first call has an effect."""
        with self._changed:
            if self.failure is not None:
                return
            self.failure = error
            self._changed.notify_all()
            listeners = list(self._listeners)
        for failed in listeners:
            failed(error)

    # ------------------------------------------------------------------ the fetch

    def _fetch_rest(self, file: BinaryIO) -> None:
        self._source = self._segment_source()
        self._dirty_at_start = frozenset(self._dirty)
        # A separate descriptor: a late read may outlive this fetch.
        self.file = cast(BinaryIO, os.fdopen(os.dup(file.fileno()), "r+b", buffering=0))
        self._held_until = time.monotonic() + HOLD_SECONDS
        self.is_readable = True
        self.settled.set()
        try:
            self._fetch_in_background()
        except Exception as error:
            self.fail(error)
            raise
        finally:
            with self._changed:
                self._has_ended = True
                # For the note and the next fetch: partial segments.
                self._dirty.update(number for number, chunks in self._present_chunks.items() if chunks)
                self._changed.notify_all()

    def _fetch_in_background(self) -> None:
        with suppress(Unavailable):  # the headers in advance are only an optimization
            self._fetch_headers()
        while (windows := self._next_windows()) is not None:
            try:
                self._fetch_windows(windows)
                continue
            except Unavailable:
                if not self.readers:
                    raise
            finally:
                self._release(windows)
            self._pause(RETRY_SECONDS)

    def _fetch_headers(self) -> None:
        missing = (n for n in range(len(self.layout.segments)) if n not in self._present)
        for number in islice(missing, PREFETCHED_HEADERS):
            with self._changed:
                self._check_progress()
            self._get_header(number)

    def _next_windows(self) -> list[int] | None:
        """Claim the next windows to fetch, all of one segment; None: all are here."""
        with self._changed:
            while True:
                self._check_progress()
                if len(self._present) == len(self.layout.segments):
                    return None
                now = time.monotonic()
                if (wait := self._next_time() - now) > 0:
                    self._changed.wait(min(wait, 1.0))
                elif windows := self._missing_windows():
                    self._claimed.update(windows)
                    self._last_request = now
                    return windows
                else:
                    self._changed.wait(1.0)

    def _check_progress(self) -> None:
        if self.failure is not None:
            raise self.failure
        self._report_progress()

    def _next_time(self) -> float:
        """The time (monotonic) at which the rest may continue."""
        if not self.readers:
            return 0.0
        quiet = (time.monotonic() if self._waiting_reads else self._last_read) + QUIET_SECONDS
        return max(self._held_until, min(quiet, self._last_request + TRICKLE_SECONDS))

    def _missing_windows(self) -> list[int]:
        while self._first_missing in self._present:
            self._first_missing += 1
        for number in range(self._first_missing, len(self.layout.segments)):
            if number in self._present:
                continue
            chunks = -(-self.layout.length(number) // CHUNK_BYTES)
            first = number * _WINDOWS_PER_SEGMENT
            windows = range(first, first + -(-chunks // WINDOW_CHUNKS))
            missing = (w for w in windows if w not in self._claimed and self._missing_chunks(w))
            if found := list(islice(missing, BATCH_WINDOWS)):
                return found
        return []

    # ------------------------------------------------------------------ windows

    def _ensure_window(self, window: int) -> None:
        deadline = time.monotonic() + self.patience
        while True:
            with self._changed:
                while window in self._claimed and self.failure is None:
                    self._changed.wait()
                if not self._missing_chunks(window):
                    return
                if self.failure is not None:
                    raise self.failure
                if self._has_ended:
                    raise Unavailable("image", "the fetch of the image was interrupted")
                windows = self._read_ahead(window)
                self._claimed.update(windows)
            try:
                self._fetch_windows(windows)
                return
            except Unavailable as error:
                if time.monotonic() > deadline:
                    self.fail(error)
                    raise
            except Exception as error:
                self.fail(error)
                raise
            finally:
                self._release(windows)
            self._pause(RETRY_SECONDS)

    def _read_ahead(self, window: int) -> list[int]:
        """A window and its read-ahead: twice the windows read just before it."""
        first = window - window % _WINDOWS_PER_SEGMENT
        before = 0
        while (
            before < BATCH_WINDOWS
            and window - before > first
            and not self._missing_chunks(window - before - 1)
        ):
            before += 1
        last = min(window + max(1, min(BATCH_WINDOWS, 2 * before)), first + _WINDOWS_PER_SEGMENT)
        found = [window]
        for following in range(window + 1, last):
            if following in self._claimed or not self._missing_chunks(following):
                break
            found.append(following)
        return found

    def _fetch_windows(self, windows: list[int]) -> None:
        """Fetch some claimed windows of one segment into the file."""
        number = windows[0] // _WINDOWS_PER_SEGMENT
        header = self._get_header(number)
        with self._changed:
            chunks = [
                chunk % CHUNKS_PER_SEGMENT
                for window in windows
                for chunk in self._missing_chunks(window)
            ]
        found = list(self._source.read_chunks(header, chunks, max_ranges=1))
        with self._changed:
            if self._has_ended:
                return
            self.eviction.ensure_free(sum(len(data) for _, data in found))
            for chunk, data in found:
                self._write_chunk(number, chunk, data)
            if self._present_chunks[number] == (1 << len(header.entries)) - 1:
                write_chunk_digests(
                    self._digest_file.fileno(), number, [entry.digest for entry in header.entries]
                )
                self._present.add(number)
                self._dirty.discard(number)
                del self._present_chunks[number], self._headers[number]

    def _get_header(self, number: int) -> SegmentHeader:
        """A segment's header, verified against the layout."""
        with self._changed:
            if (known := self._headers.get(number)) is not None:
                return known
        header = self._source.read_header(self.layout.segments[number], self.layout.length(number))
        with self._changed:
            if number not in self._present:
                self._headers[number] = header
                self._present_chunks.setdefault(number, 0)
        return header

    # ------------------------------------------------------------------ state

    def _write_chunk(self, number: int, chunk: int, data: bytes) -> None:
        if number in self._dirty_at_start or not is_zero(data):
            self._write_evicting(
                self.file, memoryview(data), number * SEGMENT_BYTES + chunk * CHUNK_BYTES
            )
        self._present_chunks[number] |= 1 << chunk

    def _has_chunk(self, chunk: int) -> bool:
        with self._changed:
            number, place = divmod(chunk, CHUNKS_PER_SEGMENT)
            return number in self._present or bool(self._present_chunks.get(number, 0) >> place & 1)

    def _missing_chunks(self, window: int) -> list[int]:
        """The chunks of a window that are not in the file."""
        last = -(-self.layout.size // CHUNK_BYTES)
        chunks = range(window * WINDOW_CHUNKS, min((window + 1) * WINDOW_CHUNKS, last))
        return [chunk for chunk in chunks if not self._has_chunk(chunk)]

    def _release(self, windows: Iterable[int]) -> None:
        with self._changed:
            self._claimed.difference_update(windows)
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        """Wait, at most until the fetch fails."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, seconds)

    @contextmanager
    def _count_read(self) -> Iterator[None]:
        with self._changed:
            if not self._waiting_reads:
                self._waiting_since = time.monotonic()
            self._waiting_reads += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting_reads -= 1
                self._last_read = time.monotonic()
                if not self._waiting_reads:
                    self._waited += self._last_read - self._waiting_since
                self._changed.notify_all()
