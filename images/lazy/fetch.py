"""Fetches a content while VMs read it: reads come first, the rest when reads pause.

It uses the same partial file and notes as any other fetch, so that each kind continues where the
other stopped. A read fetches pieces of :data:`WINDOW_CHUNKS`, a range of a stored segment: a guest
that boots reads little, but from nearly every segment (docs/lazy-start.md).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import BinaryIO, Final, cast

from images.blockindex import BlockIndex, note_blocks
from images.content import BLOCK, SEGMENT, SEGMENT_BLOCKS, is_zero
from images.fetch import ContentFetch
from images.segment import Entry, Index, Kind, head_size, parse_index, read_block
from vmjobs.errors import DigestMismatch, InvalidRequest, Unavailable

#: Chunks that are fetched for a read (256 KiB): 64 KiB would take twice as many requests, 1 MiB three
#: times as many bytes.
WINDOW: Final = 4
#: Most windows in one request, for the rest and for sequential reads: another read may have to wait
#: for that request.
BATCH: Final = 4
#: Segments whose headers are fetched before the first read, which then takes one request less.
HEADS: Final = 256
#: Seconds without a waiting read after which the rest is fetched; and seconds between small parts of
#: the rest while reads go on.
QUIET_SECONDS: Final = 0.5
TRICKLE_SECONDS: Final = 5.0
#: How long the rest waits for the guest to be ready, in seconds.
HOLD_SECONDS: Final = 60.0
#: Interval of attempts while the repository is unreachable, in seconds.
AGAIN_SECONDS: Final = 1.0

_WINDOWS: Final = SEGMENT_BLOCKS // WINDOW


@dataclass
class LiveFetch(ContentFetch):
    """A fetch whose file may be read meanwhile.

    patience: seconds for which a read waits for an unreachable repository.
    failed: called once, from any thread, with the error that ends the fetch for its readers.
    wanted: whether to retry the rest while the repository is unreachable.
    begun: called once the file may be read, through :meth:`ensure` and :attr:`file`.
    """

    patience: float = 1800.0
    failed: Callable[[Exception], object] = lambda _error: None
    wanted: Callable[[], bool] = lambda: True
    begun: Callable[[], object] = lambda: None
    #: The file, once it may be read.
    file: BinaryIO = field(init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    #: Windows that a thread is fetching; the header of each partial segment, and a bit for each
    #: chunk of it that is in the file.
    _busy: set[int] = field(default_factory=set)
    _heads: dict[int, Index] = field(default_factory=dict)
    _here: dict[int, int] = field(default_factory=dict)
    #: Segments in which chunks of zeros must be written.
    _foul: frozenset[int] = frozenset()
    _index: BlockIndex = field(init=False)
    _failure: Exception | None = None
    _over: bool = False
    #: All segments before this one are in the file.
    _first: int = 0
    _readers: int = 0
    _held_until: float = 0.0
    _last_read: float = 0.0
    _last_fill: float = 0.0
    _since: float = 0.0
    _waited: float = 0.0

    # ------------------------------------------------------------------ for readers

    def need(self, offset: int, length: int) -> bool:
        """Return once these bytes are in the file; whether the content is complete.

        Raises:
            InvalidRequest: the content has no such bytes.
            Exception: the error that :attr:`failed` got.
        """
        if not 0 <= offset <= offset + length <= self.layout.size:
            raise InvalidRequest(f"cannot read {length} bytes at {offset}: beyond the content's end")
        blocks = range(offset // BLOCK, -(-(offset + length) // BLOCK))
        if any(not self._has(block) for block in blocks):
            with self._reading():
                for window in sorted({block // WINDOW for block in blocks}):
                    self._have_window(window)
        with self._changed:
            return len(self._have) == len(self.layout.segments)

    def hurry(self) -> None:
        """Fetch the rest from now on: the guest is ready."""
        with self._changed:
            self._held_until = 0.0
            self._changed.notify_all()

    @property
    def waiting(self) -> bool:
        """Whether a read is waiting."""
        return self._readers > 0

    @property
    def waited(self) -> float:
        """Seconds for which reads have waited so far."""
        with self._changed:
            now = time.monotonic() - self._since if self._readers else 0.0
            return self._waited + now

    def fail(self, error: Exception) -> None:
        """End all waits with an error. Only the first call has an effect."""
        with self._changed:
            if self._failure is not None:
                return
            self._failure = error
            self._changed.notify_all()
        self.failed(error)

    # ------------------------------------------------------------------ the fetch

    def _fetch_rest(self, file: BinaryIO) -> None:
        folder = self.folder
        here = ((folder.path(content), folder.blocks_path(content)) for content in folder.list())
        self._index = BlockIndex(here)
        self._foul = frozenset(self._dirty)
        # A separate descriptor: a late read may outlive this fetch.
        self.file = cast(BinaryIO, os.fdopen(os.dup(file.fileno()), "r+b", buffering=0))
        self._held_until = time.monotonic() + HOLD_SECONDS
        self.begun()
        try:
            self._fill()
        except Exception as error:
            self.fail(error)
            raise
        finally:
            with self._changed:
                self._over = True
                # For the note and the next fetch: partial segments.
                self._dirty.update(number for number, blocks in self._here.items() if blocks)
                self._changed.notify_all()

    def _fill(self) -> None:
        with suppress(Unavailable):  # the headers in advance are only an optimization
            self._fetch_heads()
        while (windows := self._next_windows()) is not None:
            try:
                self._fetch_windows(windows)
                continue
            except Unavailable:
                if not self.wanted():
                    raise
            finally:
                self._release(windows)
            self._pause(AGAIN_SECONDS)

    def _fetch_heads(self) -> None:
        missing = (n for n in range(len(self.layout.segments)) if n not in self._have)
        for number in islice(missing, HEADS):
            with self._changed:
                self._look()
            self._head(number)

    def _next_windows(self) -> list[int] | None:
        """Claim the next windows to fetch, all of one segment; None: all are here."""
        with self._changed:
            while True:
                self._look()
                if len(self._have) == len(self.layout.segments):
                    return None
                now = time.monotonic()
                if (wait := self._due() - now) > 0:
                    self._changed.wait(min(wait, 1.0))
                elif windows := self._missing_windows():
                    self._busy.update(windows)
                    self._last_fill = now
                    return windows
                else:
                    self._changed.wait(1.0)

    def _look(self) -> None:
        if self._failure is not None:
            raise self._failure
        self.step(min(len(self._have) * SEGMENT, self.layout.size))

    def _due(self) -> float:
        """The time (monotonic) at which the rest may continue."""
        if not self.wanted():
            return 0.0
        quiet = (time.monotonic() if self._readers else self._last_read) + QUIET_SECONDS
        return max(self._held_until, min(quiet, self._last_fill + TRICKLE_SECONDS))

    def _missing_windows(self) -> list[int]:
        found: list[int] = []
        while self._first in self._have:
            self._first += 1
        for number in range(self._first, len(self.layout.segments)):
            if number in self._have:
                continue
            blocks = -(-self.layout.length(number) // BLOCK)
            for window in range(number * _WINDOWS, number * _WINDOWS + -(-blocks // WINDOW)):
                if window not in self._busy and self._lacking(window):
                    found.append(window)
                    if len(found) == BATCH:
                        return found
            if found:
                return found
        return found

    # ------------------------------------------------------------------ windows

    def _have_window(self, window: int) -> None:
        deadline = time.monotonic() + self.patience
        while True:
            with self._changed:
                while window in self._busy and self._failure is None:
                    self._changed.wait()
                if not self._lacking(window):
                    return
                if self._failure is not None:
                    raise self._failure
                if self._over:
                    raise Unavailable("image", "the fetch of the image was interrupted")
                windows = self._in_order(window)
                self._busy.update(windows)
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
            self._pause(AGAIN_SECONDS)

    def _in_order(self, window: int) -> list[int]:
        """A window and its read-ahead: twice the windows read just before it."""
        first = window - window % _WINDOWS
        before = 0
        while before < BATCH and window - before > first and not self._lacking(window - before - 1):
            before += 1
        last = min(window + max(1, min(BATCH, 2 * before)), first + _WINDOWS)
        found = [window]
        for following in range(window + 1, last):
            if following in self._busy or not self._lacking(following):
                break
            found.append(following)
        return found

    def _fetch_windows(self, windows: list[int]) -> None:
        """Fetch some claimed windows of one segment into the file."""
        number = windows[0] // _WINDOWS
        head = self._head(number)
        with self._changed:
            blocks = [block % SEGMENT_BLOCKS for window in windows for block in self._lacking(window)]
        found = self._read(number, head, blocks)
        with self._changed:
            if self._over:
                return
            self.room.claim(sum(len(data) for _, data in found))
            for block, data in found:
                self._write_block(number, block, data)
            if self._here[number] == (1 << len(head.entries)) - 1:
                note_blocks(self._beside.fileno(), number, [entry.digest for entry in head.entries])
                self._have.add(number)
                self._dirty.discard(number)
                del self._here[number], self._heads[number]

    def _read(self, number: int, head: Index, blocks: Iterable[int]) -> list[tuple[int, bytes]]:
        """Verified bytes of chunks of a segment, from this node or the repository."""
        found: list[tuple[int, bytes]] = []
        absent: list[tuple[int, Entry]] = []
        for block in blocks:
            entry = head.entries[block]
            if entry.kind is Kind.ZEROS:
                found.append((block, bytes(entry.size)))
            elif (data := self._index.read(entry.digest, entry.size)) is not None:
                found.append((block, data))
            else:
                absent.append((block, entry))
        if absent:
            begin = min(entry.offset for _, entry in absent)
            end = max(entry.offset + entry.length for _, entry in absent)
            body, _ = self.fetch.segment_range(self.image, self.layout.segments[number], begin, end)
            for block, entry in absent:
                stored = body[entry.offset - begin : entry.offset - begin + entry.length]
                found.append((block, read_block(entry, stored)))
        return found

    def _head(self, number: int) -> Index:
        """A segment's header, verified against the layout."""
        with self._changed:
            if (known := self._heads.get(number)) is not None:
                return known
        digest, blocks = self.layout.segments[number], -(-self.layout.length(number) // BLOCK)
        data, whole = self.fetch.segment_range(self.image, digest, 0, head_size(blocks))
        head = parse_index(data, whole=whole)
        if head.digest != digest or head.size != self.layout.length(number):
            raise DigestMismatch(f"the header of segment {digest.hex()} belongs to another segment")
        with self._changed:
            if number not in self._have:
                self._heads[number] = head
                self._here.setdefault(number, 0)
        return head

    # ------------------------------------------------------------------ state

    def _write_block(self, number: int, block: int, data: bytes) -> None:
        if number in self._foul or not is_zero(data):
            self._put(self.file, memoryview(data), number * SEGMENT + block * BLOCK)
        self._here[number] |= 1 << block

    def _has(self, block: int) -> bool:
        with self._changed:
            number, place = divmod(block, SEGMENT_BLOCKS)
            return number in self._have or bool(self._here.get(number, 0) >> place & 1)

    def _lacking(self, window: int) -> list[int]:
        """The chunks of a window that are not in the file."""
        last = -(-self.layout.size // BLOCK)
        blocks = range(window * WINDOW, min((window + 1) * WINDOW, last))
        return [block for block in blocks if not self._has(block)]

    def _release(self, windows: Iterable[int]) -> None:
        with self._changed:
            self._busy.difference_update(windows)
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        """Wait, at most until the fetch fails."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, seconds)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._changed:
            if not self._readers:
                self._since = time.monotonic()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._last_read = time.monotonic()
                if not self._readers:
                    self._waited += self._last_read - self._since
                self._changed.notify_all()
