"""Layouts and stored segments, made from bytes in memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from images.content import CHUNK_BYTES, SEGMENT_BYTES, ContentLayout, digest_chunks, segment_digest
from images.segment import encode_chunks


def compute_layout_of_bytes(data: bytes) -> ContentLayout:
    view = memoryview(data)
    pieces = (view[begin : begin + SEGMENT_BYTES] for begin in range(0, len(data), SEGMENT_BYTES))
    return ContentLayout(len(data), tuple(segment_digest(digest_chunks(piece)) for piece in pieces))


def encode_segment(
    data: bytes | memoryview, digests: Sequence[bytes] | None = None, absent: Collection[int] = ()
) -> bytes:
    """Encode a segment as sent. digests: of its chunks, if known. absent: chunks to leave out."""
    view = memoryview(data)
    digests = digests or digest_chunks(view)
    chunks = (
        (n, view[n * CHUNK_BYTES :][:CHUNK_BYTES]) for n in range(len(digests)) if n not in absent
    )
    return bytes(encode_chunks(digests, len(view), chunks))
