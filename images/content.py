"""What the bytes of a disk are called: a tree of digests over fixed blocks.

::

    content   tree:…   sha256("vmjobs-content-1\\0" + size + its segments' digests)
      segment          sha256("vmjobs-segment-1\\0" + its blocks' digests)    128 blocks, 8 MiB
        block          sha256(bytes)                                          64 KiB

Only the bytes decide: the same disk has the same digest whatever format it came in and however it
is stored. Every block can be checked by itself, against a digest that the content's own digest pins.
64 KiB is a compromise: the smaller the blocks, the less of a changed file system is sent again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO, Final, Self

from vmjobs.errors import DigestMismatch

BLOCK: Final = 64 * 1024
SEGMENT_BLOCKS: Final = 128
SEGMENT: Final = BLOCK * SEGMENT_BLOCKS
#: The largest content that there can be, in bytes.
MAX_SIZE: Final = 64 * 1024**4

_CONTENT_TAG: Final = b"vmjobs-content-1\0"
_SEGMENT_TAG: Final = b"vmjobs-segment-1\0"
_SIZE: Final = struct.Struct(">Q")
_DIGEST_BYTES: Final = 32

PREFIX: Final = "tree:"


def block_digest(data: bytes | memoryview) -> bytes:
    """The digest of a block's bytes: 32 bytes."""
    return hashlib.sha256(data).digest()


def segment_digest(blocks: Iterable[bytes]) -> bytes:
    """The digest of a segment, of its blocks' digests: 32 bytes."""
    return hashlib.sha256(_SEGMENT_TAG + b"".join(blocks)).digest()


@lru_cache(maxsize=256)
def zero_block(length: int = BLOCK) -> bytes:
    """The digest of a block of ``length`` zero bytes."""
    return block_digest(bytes(length))


@lru_cache(maxsize=64)
def zero_segment(length: int = SEGMENT) -> bytes:
    """The digest of a segment of ``length`` zero bytes."""
    return segment_digest(zero_block(size) for size in block_lengths(length))


def block_lengths(length: int) -> list[int]:
    """How long the blocks of ``length`` bytes of content are: all full but perhaps the last."""
    full, rest = divmod(length, BLOCK)
    return [BLOCK] * full + ([rest] if rest else [])


def layout_size(size: int) -> int:
    """How many bytes the layout of a content of ``size`` bytes has."""
    return len(_CONTENT_TAG) + _SIZE.size + -(-size // SEGMENT) * _DIGEST_BYTES


@dataclass(frozen=True)
class Layout:
    """A content as the list of its segments.

    size: bytes. segments: their digests, 32 bytes each, in order.
    """

    size: int
    segments: tuple[bytes, ...]

    @property
    def digest(self) -> str:
        """The content's digest, ``tree:`` and 64 hexadecimal digits."""
        return PREFIX + hashlib.sha256(self.to_bytes()).hexdigest()

    def length(self, number: int) -> int:
        """Bytes of content in segment ``number``: full but perhaps the last."""
        return min(SEGMENT, self.size - number * SEGMENT)

    def stored(self) -> Iterator[tuple[int, bytes]]:
        """Number and digest of the segments that are not all zeros."""
        for number, digest in enumerate(self.segments):
            if digest != zero_segment(self.length(number)):
                yield number, digest

    def to_bytes(self) -> bytes:
        """The layout as it is stored, sent and digested."""
        return _CONTENT_TAG + _SIZE.pack(self.size) + b"".join(self.segments)

    @classmethod
    def parse(cls, data: bytes, digest: str) -> Self:
        """The layout that ``data`` is, checked against the digest by which it was asked for.

        Raises:
            DigestMismatch: the bytes are others, or are no layout.
        """
        if PREFIX + hashlib.sha256(data).hexdigest() != digest:
            raise DigestMismatch(f"the layout of {digest} is damaged: its bytes have another digest")
        head = len(_CONTENT_TAG) + _SIZE.size
        if not data.startswith(_CONTENT_TAG) or len(data) < head:
            raise DigestMismatch(f"{digest} is not the layout of a content")
        (size,) = _SIZE.unpack_from(data, len(_CONTENT_TAG))
        if size > MAX_SIZE or len(data) - head != -(-size // SEGMENT) * _DIGEST_BYTES:
            raise DigestMismatch(f"{digest} is not the layout of a content: its size does not fit")
        digests = (data[i : i + _DIGEST_BYTES] for i in range(head, len(data), _DIGEST_BYTES))
        return cls(size, tuple(digests))


#: Called with the number of bytes that are done.
Done = Callable[[int], None]


def scan(file: BinaryIO, size: int) -> Iterator[tuple[int, list[bytes] | None]]:
    """The segments of a file in order: number, and the digests of its blocks.

    ``None`` stands for a segment that is a hole: all zeros, and not even read. ``file`` is open
    unbuffered; one segment at a time is held in memory.

    Raises:
        OSError: reading fails, or the file is shorter than ``size``.
    """
    buffer = bytearray(SEGMENT)
    for number in range(-(-size // SEGMENT)):
        data = read_segment(file, number, size, buffer)
        yield number, None if data is None else block_digests(data)


def read_segment(file: BinaryIO, number: int, size: int, buffer: bytearray) -> memoryview | None:
    """Segment ``number`` of a file of ``size`` bytes; ``None`` where it is a hole.

    The bytes are in ``buffer``, which is :data:`SEGMENT` bytes long, until its next use.
    Raises OSError where the file is shorter or cannot be read.
    """
    offset = number * SEGMENT
    length = min(SEGMENT, size - offset)
    if _is_hole(file.fileno(), offset, length):
        return None
    view, done = memoryview(buffer)[:length], 0
    while done < length:
        count = os.preadv(file.fileno(), [view[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the file became shorter while it was read")
        done += count
    return view


def block_digests(data: memoryview) -> list[bytes]:
    """The digests of the blocks of a segment's bytes."""
    found = []
    for begin in range(0, len(data), BLOCK):
        piece = data[begin : begin + BLOCK]
        found.append(zero_block(len(piece)) if is_zero(piece) else block_digest(piece))
    return found


_ZEROS: Final = bytes(BLOCK)


def is_zero(piece: memoryview | bytes) -> bool:
    """Whether a block (at most :data:`BLOCK` bytes) has nothing but zeros."""
    if len(piece) != BLOCK:
        return not any(piece)
    # Views are compared an item at a time, bytes by memcmp: ten times as fast, the copy included.
    return not piece[0] and bytes(piece) == _ZEROS


def layout_of(file: BinaryIO, size: int, done: Done | None = None) -> Layout:
    """The layout of a file's first ``size`` bytes. Holes cost nothing. Raises OSError."""
    segments = []
    for number, blocks in scan(file, size):
        length = min(SEGMENT, size - number * SEGMENT)
        segments.append(zero_segment(length) if blocks is None else segment_digest(blocks))
        if done is not None:
            done(number * SEGMENT + length)
    return Layout(size, tuple(segments))


def layout_of_bytes(data: bytes) -> Layout:
    """The layout of some bytes in memory."""
    view = memoryview(data)
    pieces = (view[begin : begin + SEGMENT] for begin in range(0, len(data), SEGMENT))
    return Layout(len(data), tuple(segment_digest(block_digests(piece)) for piece in pieces))


def _is_hole(descriptor: int, offset: int, length: int) -> bool:
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA) >= offset + length
    except OSError as error:
        # ENXIO: a hole up to the end; anything else: a file system that knows of no holes.
        return error.errno == errno.ENXIO
