"""The stored form of segments: the digests of the chunks, then the compressed chunks.

::

    8 bytes   "VMJSEG1\\n"
    u32       number of chunks, 1 to 128
    u32       total bytes of content
    for each chunk:
      32 bytes  digest of its content
      u32       stored bytes; the two topmost bits: the encoding, see ChunkEncoding
    the stored bytes of the chunks, one after the other

Numbers are big-endian. The parser trusts neither the lengths nor the size that a compressed frame
announces.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import zstandard

from images.content import (
    CHUNK_BYTES,
    CHUNKS_PER_SEGMENT,
    SEGMENT_BYTES,
    chunk_digest,
    chunk_lengths,
    is_zero,
    zero_chunk_digest,
)
from images.content import segment_digest as digest_of_chunks
from vmjobs.errors import DigestMismatch

MAGIC: Final = b"VMJSEG1\n"
_HEADER: Final = struct.Struct(">8sII")
_ENTRY: Final = struct.Struct(">32sI")
_LENGTH_MASK: Final = (1 << 30) - 1
#: Largest stored segment, in bytes.
MAX_STORED_BYTES: Final = _HEADER.size + CHUNKS_PER_SEGMENT * _ENTRY.size + SEGMENT_BYTES
#: zstd compression level: takes about as much time as the digests.
COMPRESSION_LEVEL: Final = 1


class ChunkEncoding(IntEnum):
    """Encoding of a chunk: zeros, plain bytes, a zstd frame, or absent.

    ABSENT occurs only in uploads to a repository, which has the chunk already.
    """

    ZEROS = 0
    PLAIN = 1
    ZSTD = 2
    ABSENT = 3


@dataclass(frozen=True)
class ChunkEntry:
    """A stored chunk. offset, length: stored bytes in the segment; size: of content."""

    digest: bytes
    kind: ChunkEncoding
    offset: int
    length: int
    size: int


@dataclass(frozen=True)
class SegmentHeader:
    """Header of a stored segment. size: bytes of content; stored: bytes stored."""

    entries: tuple[ChunkEntry, ...]
    size: int
    stored: int

    @property
    def digest(self) -> bytes:
        """The segment's digest: 32 bytes."""
        return digest_of_chunks(entry.digest for entry in self.entries)

    @property
    def absent(self) -> list[int]:
        """Numbers of the absent chunks."""
        return [n for n, entry in enumerate(self.entries) if entry.kind is ChunkEncoding.ABSENT]


def header_size(chunks: int) -> int:
    """Size in bytes of the header of a segment with that many chunks."""
    return _HEADER.size + chunks * _ENTRY.size


def parse_header(data: bytes | memoryview, *, whole: int) -> SegmentHeader:
    """Parse the header of a stored segment. whole: bytes of the segment.

    Raises:
        DigestMismatch: ``data`` is not a header, or not a complete one.
    """
    if len(data) < _HEADER.size:
        raise DigestMismatch("the segment ends within its header")
    magic, count, size = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DigestMismatch("the data is not a segment")
    lengths = chunk_lengths(size) if size <= SEGMENT_BYTES else []
    if not 0 < count <= CHUNKS_PER_SEGMENT or len(lengths) != count:
        raise DigestMismatch(f"a segment of {size} bytes cannot have {count} chunks")
    if len(data) < header_size(count):
        raise DigestMismatch("the segment ends within its header")
    entries, offset = [], header_size(count)
    for number, length in enumerate(lengths):
        digest, word = _ENTRY.unpack_from(data, header_size(number))
        entry = ChunkEntry(digest, ChunkEncoding(word >> 30), offset, word & _LENGTH_MASK, length)
        _check_entry(number, entry)
        entries.append(entry)
        offset += entry.length
    if offset != whole:
        raise DigestMismatch(f"the header announces a segment of {offset} bytes, but it has {whole}")
    return SegmentHeader(tuple(entries), size, whole)


def _check_entry(number: int, entry: ChunkEntry) -> None:
    fits = {
        ChunkEncoding.ZEROS: entry.length == 0 and entry.digest == zero_chunk_digest(entry.size),
        ChunkEncoding.PLAIN: entry.length == entry.size,
        ChunkEncoding.ZSTD: 0 < entry.length < entry.size,
        ChunkEncoding.ABSENT: entry.length == 0,
    }
    if not fits[entry.kind]:
        raise DigestMismatch(f"chunk {number} of a segment cannot be {entry.length} bytes long")


def decompressor() -> zstandard.ZstdDecompressor:
    """A decompressor for :func:`read_chunk`, for one thread.

    Its creation takes a fifth of the time of reading a chunk.
    """
    return zstandard.ZstdDecompressor(max_window_size=CHUNK_BYTES * 16)


def read_chunk(
    entry: ChunkEntry, stored: bytes | memoryview, using: zstandard.ZstdDecompressor | None = None
) -> bytes:
    """Decode a stored chunk, and verify its content against its digest.

    using: a :func:`decompressor`, to reuse for many chunks.

    Raises:
        DigestMismatch: the stored bytes are damaged, or the chunk is absent.
    """
    if entry.kind is ChunkEncoding.ZEROS:
        return bytes(entry.size)
    if entry.kind is ChunkEncoding.ABSENT:
        raise DigestMismatch(f"chunk {entry.digest.hex()} is missing from the segment")
    if entry.kind is ChunkEncoding.PLAIN:
        data = bytes(stored)
    else:
        data = _decompress(entry, stored, using or decompressor())
    if len(data) != entry.size or chunk_digest(data) != entry.digest:
        raise DigestMismatch(f"chunk {entry.digest.hex()} is damaged")
    return data


def _decompress(
    entry: ChunkEntry, stored: bytes | memoryview, using: zstandard.ZstdDecompressor
) -> bytes:
    try:
        # Decompression allocates the announced size: refuse a frame that announces too much.
        if zstandard.get_frame_parameters(stored).content_size != entry.size:
            raise DigestMismatch(f"chunk {entry.digest.hex()} announces a wrong size")
        return using.decompress(stored, max_output_size=entry.size, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError) as error:
        raise DigestMismatch(f"chunk {entry.digest.hex()} is damaged: {error}") from error


def decode_segment(data: bytes | memoryview, digest: bytes) -> bytes:
    """Decode a stored segment, and verify all of its content.

    Raises:
        DigestMismatch: the segment has another digest, or is incomplete.
    """
    view = memoryview(data)
    header = parse_header(view, whole=len(view))
    if header.digest != digest:
        raise DigestMismatch(f"the segment's digest is {header.digest.hex()} (expected {digest.hex()})")
    using = decompressor()
    return b"".join(read_chunk(e, view[e.offset : e.offset + e.length], using) for e in header.entries)


def encode_chunks(
    digests: Sequence[bytes], size: int, chunks: Iterable[tuple[int, memoryview]]
) -> bytearray:
    """Encode a segment to send while its chunks are read; omit all other chunks.

    Args:
        digests: of all its chunks. size: bytes of content.
        chunks: number and bytes of each chunk to send, in order; may omit chunks of zeros.
    """
    compressor = zstandard.ZstdCompressor(
        level=COMPRESSION_LEVEL, write_content_size=True, write_checksum=False
    )
    packed = bytearray(header_size(len(digests)))
    words = [
        (ChunkEncoding.ZEROS if digest == zero_chunk_digest(length) else ChunkEncoding.ABSENT) << 30
        for digest, length in zip(digests, chunk_lengths(size), strict=True)
    ]
    for number, piece in chunks:
        kind, body = _encode_chunk(piece, compressor)
        words[number] = kind << 30 | len(body)
        packed += body
    _HEADER.pack_into(packed, 0, MAGIC, len(digests), size)
    for number, (digest, word) in enumerate(zip(digests, words, strict=True)):
        _ENTRY.pack_into(packed, header_size(number), digest, word)
    return packed


def _encode_chunk(
    piece: memoryview, compressor: zstandard.ZstdCompressor
) -> tuple[ChunkEncoding, bytes | memoryview]:
    if is_zero(piece):
        return ChunkEncoding.ZEROS, b""
    frame = compressor.compress(piece)
    return (ChunkEncoding.ZSTD, frame) if len(frame) < len(piece) else (ChunkEncoding.PLAIN, piece)


def build_segment(
    header: SegmentHeader, bodies: Sequence[tuple[ChunkEncoding, bytes | memoryview]]
) -> bytes:
    """A complete stored segment, from its header and the encoded chunks."""
    entries = [
        _ENTRY.pack(entry.digest, kind << 30 | len(body))
        for entry, (kind, body) in zip(header.entries, bodies, strict=True)
    ]
    header_bytes = _HEADER.pack(MAGIC, len(entries), header.size)
    return b"".join([header_bytes, *entries, *(body for _, body in bodies)])
