"""A content that is in use while it is fetched: what is read comes first, the rest when there is time.

It grows in the same file as any other fetch's, with the same notes, so that either goes on where the
other was broken off. What is read comes in pieces of :data:`WINDOW` bytes, a range of a stored
segment: a guest that boots reads little, but from nearly every segment (docs/lazy-start.md).
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

#: What is fetched for a read, in blocks: with 64 KiB twice as many requests, with 1 MiB three times
#: as many bytes.
WINDOW: Final = 4
#: What is fetched at once of the rest, and for reads in order, in windows: another read may have to
#: wait until that is here.
BATCH: Final = 4
#: Segments whose heads are fetched before anybody reads: a read then takes one request less.
HEADS: Final = 256
#: The rest is fetched after so many seconds without a read that had to wait; and where reads do not
#: cease a little of it every few seconds.
QUIET_SECONDS: Final = 0.5
TRICKLE_SECONDS: Final = 5.0
#: How long the rest waits for the guest to be ready, in seconds.
HOLD_SECONDS: Final = 60.0
#: Between two attempts while the repository is out of reach, in seconds.
AGAIN_SECONDS: Final = 1.0

_WINDOWS: Final = SEGMENT_BLOCKS // WINDOW


@dataclass
class LiveFetch(ContentFetch):
    """A fetch whose file may be read meanwhile.

    patience: seconds for which a read waits for a repository that is out of reach.
    failed: called once with what ends the fetch for those who read; from any thread.
    wanted: whether the rest is to be tried again where the repository is out of reach.
    begun: called once the file may be read, by :meth:`need` and :attr:`file`.
    """

    patience: float = 1800.0
    failed: Callable[[Exception], object] = lambda _error: None
    wanted: Callable[[], bool] = lambda: True
    begun: Callable[[], object] = lambda: None
    #: The file, once it may be read.
    file: BinaryIO = field(init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    #: Windows that somebody is fetching; of each segment its head, and a bit for each block here.
    _busy: set[int] = field(default_factory=set)
    _heads: dict[int, Index] = field(default_factory=dict)
    _here: dict[int, int] = field(default_factory=dict)
    #: Segments in which blocks of zeros have to be written.
    _foul: frozenset[int] = frozenset()
    _index: BlockIndex = field(init=False)
    _failure: Exception | None = None
    _over: bool = False
    #: All segments before this one are here.
    _first: int = 0
    _readers: int = 0
    _held_until: float = 0.0
    _last_read: float = 0.0
    _last_fill: float = 0.0
    _since: float = 0.0
    _waited: float = 0.0

    # ------------------------------------------------------------------ for those who read

    def need(self, offset: int, length: int) -> bool:
        """Return once these bytes are in the file; whether all of the content is.

        Raises:
            InvalidRequest: the content has no such bytes.
            Exception: what :attr:`failed` was called with.
        """
        if not 0 <= offset <= offset + length <= self.layout.size:
            raise InvalidRequest(f"the content has no {length} bytes at {offset}")
        blocks = range(offset // BLOCK, -(-(offset + length) // BLOCK))
        if any(not self._has(block) for block in blocks):
            with self._reading():
                for window in sorted({block // WINDOW for block in blocks}):
                    self._have_window(window)
        with self._changed:
            return len(self._have) == len(self.layout.segments)

    def hurry(self) -> None:
        """The guest is ready: the rest need not wait any longer."""
        with self._changed:
            self._held_until = 0.0
            self._changed.notify_all()

    @property
    def waiting(self) -> bool:
        """Whether a read waits now."""
        return self._readers > 0

    @property
    def waited(self) -> float:
        """For how many seconds reads have waited."""
        with self._changed:
            now = time.monotonic() - self._since if self._readers else 0.0
            return self._waited + now

    def fail(self, error: Exception) -> None:
        """Let no one wait any longer. Only the first call counts."""
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
        # A descriptor of its own: a read may be late.
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
                # For the note, and for whoever goes on: begun, but not finished.
                self._dirty.update(number for number, blocks in self._here.items() if blocks)
                self._changed.notify_all()

    def _fill(self) -> None:
        with suppress(Unavailable):  # they are but a beginning
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
        """Windows to be fetched next, all of one segment, and claimed; None: all is here."""
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
        """When the rest may go on."""
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
                    raise Unavailable("image", "the fetch of the image was broken off")
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
        """A window and those behind it that are worth fetching along: twice what was read before it."""
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
        """Have some windows of one segment, claimed before."""
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
        """The bytes of some blocks of a segment, checked: from this node or from the repository."""
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
        """A segment's head, checked against the layout."""
        with self._changed:
            if (known := self._heads.get(number)) is not None:
                return known
        digest, blocks = self.layout.segments[number], -(-self.layout.length(number) // BLOCK)
        data, whole = self.fetch.segment_range(self.image, digest, 0, head_size(blocks))
        head = parse_index(data, whole=whole)
        if head.digest != digest or head.size != self.layout.length(number):
            raise DigestMismatch(f"the head of the segment {digest.hex()} is another one's")
        with self._changed:
            if number not in self._have:
                self._heads[number] = head
                self._here.setdefault(number, 0)
        return head

    # ------------------------------------------------------------------ under the lock

    def _write_block(self, number: int, block: int, data: bytes) -> None:
        if number in self._foul or not is_zero(data):
            self._put(self.file, memoryview(data), number * SEGMENT + block * BLOCK)
        self._here[number] |= 1 << block

    def _has(self, block: int) -> bool:
        with self._changed:
            number, place = divmod(block, SEGMENT_BLOCKS)
            return number in self._have or bool(self._here.get(number, 0) >> place & 1)

    def _lacking(self, window: int) -> list[int]:
        """The blocks of a window that are not here."""
        last = -(-self.layout.size // BLOCK)
        blocks = range(window * WINDOW, min((window + 1) * WINDOW, last))
        return [block for block in blocks if not self._has(block)]

    def _release(self, windows: Iterable[int]) -> None:
        with self._changed:
            self._busy.difference_update(windows)
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        """Wait, unless the fetch fails meanwhile."""
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
