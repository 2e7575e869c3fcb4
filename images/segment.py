"""A segment as it is stored and sent: its blocks' digests, then each block compressed by itself.

::

    8 bytes   "VMJSEG1\\n"
    u32       number of blocks, 1 to 128
    u32       bytes of content in all
    for each block:
      32 bytes  digest of its content
      u32       how many bytes it has here, and in the two topmost bits how: see Kind
    the blocks' bytes, one after the other

Numbers are big-endian. Whoever reads one trusts nothing: not the lengths, and not what a
compressed frame says of its own size.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import zstandard

from images.content import (
    BLOCK,
    SEGMENT,
    SEGMENT_BLOCKS,
    block_digest,
    block_lengths,
    is_zero,
    zero_block,
)
from images.content import segment_digest as digest_of_blocks
from vmjobs.errors import DigestMismatch

MAGIC: Final = b"VMJSEG1\n"
_HEAD: Final = struct.Struct(">8sII")
_ENTRY: Final = struct.Struct(">32sI")
_LENGTH: Final = (1 << 30) - 1
#: A stored segment is never larger, in bytes.
MAX_STORED: Final = _HEAD.size + SEGMENT_BLOCKS * _ENTRY.size + SEGMENT
#: How hard to compress: what costs about as much time as the digests do.
LEVEL: Final = 1


class Kind(IntEnum):
    """How a block is present: as zeros, as it is, as a zstd frame, or not at all.

    ABSENT occurs on the way to a repository only: whoever receives it has the block already.
    """

    ZEROS = 0
    PLAIN = 1
    ZSTD = 2
    ABSENT = 3


@dataclass(frozen=True)
class Entry:
    """A block in a stored segment. offset, length: in bytes, of what is stored; size: of content."""

    digest: bytes
    kind: Kind
    offset: int
    length: int
    size: int


@dataclass(frozen=True)
class Index:
    """A stored segment's head. size: bytes of content; stored: bytes of the whole."""

    entries: tuple[Entry, ...]
    size: int
    stored: int

    @property
    def digest(self) -> bytes:
        """The segment's digest: 32 bytes."""
        return digest_of_blocks(entry.digest for entry in self.entries)

    @property
    def absent(self) -> list[int]:
        """Numbers of the blocks that did not come along."""
        return [n for n, entry in enumerate(self.entries) if entry.kind is Kind.ABSENT]


def head_size(blocks: int) -> int:
    """Bytes before the first block's bytes, in a segment of so many blocks."""
    return _HEAD.size + blocks * _ENTRY.size


def parse_index(data: bytes | memoryview, *, whole: int) -> Index:
    """The head of a stored segment of ``whole`` bytes; ``data`` has at least the head.

    Raises:
        DigestMismatch: it is not one; the message says what is wrong with it.
    """
    if len(data) < _HEAD.size:
        raise DigestMismatch("a segment is cut off within its head")
    magic, count, size = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise DigestMismatch("these bytes are not a segment")
    lengths = block_lengths(size) if size <= SEGMENT else []
    if not 0 < count <= SEGMENT_BLOCKS or len(lengths) != count:
        raise DigestMismatch(f"a segment of {size} bytes cannot have {count} blocks")
    if len(data) < head_size(count):
        raise DigestMismatch("a segment is cut off within its head")
    entries, offset = [], head_size(count)
    for number, length in enumerate(lengths):
        digest, word = _ENTRY.unpack_from(data, head_size(number))
        entry = Entry(digest, Kind(word >> 30), offset, word & _LENGTH, length)
        _check_entry(number, entry)
        entries.append(entry)
        offset += entry.length
    if offset != whole:
        raise DigestMismatch(f"a segment says that it has {offset} bytes and has {whole}")
    return Index(tuple(entries), size, whole)


def _check_entry(number: int, entry: Entry) -> None:
    fits = {
        Kind.ZEROS: entry.length == 0 and entry.digest == zero_block(entry.size),
        Kind.PLAIN: entry.length == entry.size,
        Kind.ZSTD: 0 < entry.length < entry.size,
        Kind.ABSENT: entry.length == 0,
    }
    if not fits[entry.kind]:
        raise DigestMismatch(f"block {number} of a segment cannot be {entry.length} bytes long")


def decompressor() -> zstandard.ZstdDecompressor:
    """What :func:`read_block` uses; for one thread. To make one takes a fifth of what a block takes."""
    return zstandard.ZstdDecompressor(max_window_size=BLOCK * 16)


def read_block(
    entry: Entry, stored: bytes | memoryview, using: zstandard.ZstdDecompressor | None = None
) -> bytes:
    """A block's content, of the bytes that are stored of it; checked against its digest.

    using: a :func:`decompressor`, where there are many blocks to read.

    Raises:
        DigestMismatch: they are others than they were, or the block did not come along.
    """
    if entry.kind is Kind.ZEROS:
        return bytes(entry.size)
    if entry.kind is Kind.ABSENT:
        raise DigestMismatch(f"the block {entry.digest.hex()} did not come along")
    if entry.kind is Kind.PLAIN:
        data = bytes(stored)
    else:
        data = _decompressed(entry, stored, using or decompressor())
    if len(data) != entry.size or block_digest(data) != entry.digest:
        raise DigestMismatch(f"the block {entry.digest.hex()} is damaged")
    return data


def _decompressed(entry: Entry, stored: bytes | memoryview, using: zstandard.ZstdDecompressor) -> bytes:
    try:
        # A frame that announces more than a block would have that much memory reserved for it.
        if zstandard.get_frame_parameters(stored).content_size != entry.size:
            raise DigestMismatch(f"the block {entry.digest.hex()} announces another size than it has")
        return using.decompress(stored, max_output_size=entry.size, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError) as error:
        raise DigestMismatch(f"the block {entry.digest.hex()} is damaged: {error}") from error


def unpack(data: bytes | memoryview, digest: bytes) -> bytes:
    """The content of a stored segment, all of it checked.

    Raises:
        DigestMismatch: it is not the segment that ``digest`` names, or not complete.
    """
    view = memoryview(data)
    index = parse_index(view, whole=len(view))
    if index.digest != digest:
        raise DigestMismatch(f"a segment is {index.digest.hex()} and not {digest.hex()}")
    using = decompressor()
    return b"".join(read_block(e, view[e.offset : e.offset + e.length], using) for e in index.entries)


def pack(
    data: bytes | memoryview, digests: Sequence[bytes] | None = None, absent: Collection[int] = ()
) -> bytes:
    """A segment to be stored or sent.

    Args:
        data: the segment's content, 1 to :data:`images.content.SEGMENT` bytes.
        digests: of its blocks, where they are known already.
        absent: numbers of the blocks to leave out, because the receiver has them.
    """
    view = memoryview(data)
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=False)
    entries, bodies = [], []
    for number, begin in enumerate(range(0, len(view), BLOCK)):
        piece = view[begin : begin + BLOCK]
        digest = digests[number] if digests is not None else block_digest(piece)
        kind, body = _stored(piece, compressor) if number not in absent else (Kind.ABSENT, b"")
        entries.append(_ENTRY.pack(digest, kind << 30 | len(body)))
        bodies.append(body)
    return b"".join([_HEAD.pack(MAGIC, len(entries), len(view)), *entries, *bodies])


def pack_blocks(
    digests: Sequence[bytes], size: int, blocks: Iterable[tuple[int, memoryview]]
) -> bytearray:
    """A segment to be sent, packed while its blocks are read; all others are left out.

    Args:
        digests: of all its blocks. size: bytes of content.
        blocks: number and bytes of those to send, in order. Zeros need not be among them.
    """
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=False)
    packed = bytearray(head_size(len(digests)))
    words = [
        (Kind.ZEROS if digest == zero_block(length) else Kind.ABSENT) << 30
        for digest, length in zip(digests, block_lengths(size), strict=True)
    ]
    for number, piece in blocks:
        kind, body = _stored(piece, compressor)
        words[number] = kind << 30 | len(body)
        packed += body
    _HEAD.pack_into(packed, 0, MAGIC, len(digests), size)
    for number, (digest, word) in enumerate(zip(digests, words, strict=True)):
        _ENTRY.pack_into(packed, head_size(number), digest, word)
    return packed


def _stored(piece: memoryview, compressor: zstandard.ZstdCompressor) -> tuple[Kind, bytes | memoryview]:
    if is_zero(piece):
        return Kind.ZEROS, b""
    frame = compressor.compress(piece)
    return (Kind.ZSTD, frame) if len(frame) < len(piece) else (Kind.PLAIN, piece)


def assemble(index: Index, bodies: Sequence[tuple[Kind, bytes | memoryview]]) -> bytes:
    """A whole stored segment, from a head and each block's way of being present and bytes."""
    entries = [
        _ENTRY.pack(entry.digest, kind << 30 | len(body))
        for entry, (kind, body) in zip(index.entries, bodies, strict=True)
    ]
    head = _HEAD.pack(MAGIC, len(entries), index.size)
    return b"".join([head, *entries, *(body for _, body in bodies)])
