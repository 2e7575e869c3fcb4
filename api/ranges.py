"""Serves bytes over HTTP, whole or a range (RFC 9110), without loading them all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from itertools import chain
from typing import Final

from flask import request
from werkzeug.wrappers import Response
from werkzeug.wsgi import wrap_file

from api.operation import BinaryBody, Reply, RequestHeader
from api.problems import RangeNotSatisfiable
from repository.storage.blobs import BlobReader
from repository.storage.objects.base import ObjectReader

READ_BYTES: Final = 256 * 1024
OCTET_STREAM: Final = "application/octet-stream"
#: With this WSGI extension the server copies files to sockets (sendfile).
FILE_WRAPPER: Final = "wsgi.file_wrapper"
_ONE_RANGE: Final = re.compile(r"bytes=\s*(\d{0,18})-(\d{0,18})\s*", re.ASCII | re.IGNORECASE)


IF_NONE_MATCH: Final = RequestHeader("If-None-Match", "the ETag of an earlier answer")
BYTES_HEADERS: Final = (
    RequestHeader("Range", "one range of bytes: bytes=0-99, bytes=100- or bytes=-50"),
    RequestHeader("If-Range", "an ETag: use Range only if the body still has it"),
    IF_NONE_MATCH,
)
BYTES: Final = {
    200: Reply("all bytes", BinaryBody("the bytes"), {"Accept-Ranges": "bytes", "ETag": "a digest"}),
    206: Reply("the requested range", BinaryBody("the bytes"), {"Content-Range": "the range"}),
    304: Reply("unchanged: If-None-Match has the present ETag"),
}
#: For bodies that grow, such as the output of a job: they have no ETag.
STREAM_BYTES_HEADERS: Final = BYTES_HEADERS[:1]
STREAM_BYTES: Final = {status: BYTES[status] for status in (200, 206)}


def parse_range(header: str | None, size: int) -> range | None:
    """Return the bytes that a ``Range`` header requests of a body of ``size`` bytes.

    None means the whole body: there is no header, or one that a server may ignore (another unit, bad
    syntax, several ranges).

    Raises:
        RangeNotSatisfiable: the range begins beyond the end.
    """
    match = _ONE_RANGE.fullmatch(header or "")
    if not match or match[1] == match[2] == "":
        return None
    if match[1] == "":
        length = min(int(match[2]), size)
        if length == 0:
            raise RangeNotSatisfiable(size)
        return range(size - length, size)
    start = int(match[1])
    if match[2] and int(match[2]) < start:
        return None
    if start >= size:
        raise RangeNotSatisfiable(size)
    return range(start, min(int(match[2]) + 1, size) if match[2] else size)


def send(
    size: int,
    read: Callable[[int, int], Iterable[bytes]],
    *,
    etag: str = "",
    immutable: bool = False,
    public: bool = False,
    file: FileIO | None = None,
    close: Callable[[], None] = lambda: None,
) -> Response:
    """Answer with ``size`` bytes, or the requested range of them, and then call ``close``.

    read: returns the bytes from a start up to, not including, a stop. etag: a digest of the whole
    body, if it has one. immutable: it never changes. public: shared caches may keep it if it is
    immutable. file: an open one with the bytes, for the kernel to send; closing it has the effect of
    ``close``.
    """
    try:
        headers = response_headers(etag, immutable, public)
        if etag and request.if_none_match.contains(etag):
            close()
            return Response(status=304, headers=headers)
        chosen, status = select_range(_effective_range(etag), size, headers)
        body: Iterable[bytes]
        if can_sendfile := file is not None and FILE_WRAPPER in request.environ:
            file.seek(chosen.start)
            body = wrap_file(request.environ, file)
        else:
            pieces = iter(read(chosen.start, chosen.stop))
            # Read before the headers are sent: a small damaged file is answered with its problem
            # document. A large one breaks off, and the client notices by its digest.
            body = chain([next(pieces, b"")], pieces)
    except BaseException:
        close()
        raise
    response = Response(
        body, status, headers, content_type=OCTET_STREAM, direct_passthrough=can_sendfile
    )
    response.call_on_close(close)
    return response


def send_bytes(
    data: bytes, *, etag: str = "", immutable: bool = False, public: bool = False
) -> Response:
    """Answer with a few bytes; see :func:`send`."""

    def read(start: int, stop: int) -> list[bytes]:
        return [data[start:stop]]

    return send(len(data), read, etag=etag, immutable=immutable, public=public)


def send_object(
    reader: ObjectReader, *, etag: str, immutable: bool = False, public: bool = False
) -> Response:
    """Answer with a stored object; see :func:`send`."""

    def read(start: int, stop: int) -> Iterator[bytes]:
        reader.seek(start)
        left = stop - start
        while left > 0 and (data := reader.read(min(READ_BYTES, left))):
            left -= len(data)
            yield data

    return send(
        reader.size,
        read,
        etag=etag,
        immutable=immutable,
        public=public,
        file=reader.file,
        close=reader.close,
    )


def send_blob(blob: BlobReader) -> Response:
    """Answer with a blob, whose digest is its ETag; see :func:`send`."""

    def read(start: int, stop: int) -> Iterator[bytes]:
        return part_of_verified(blob, blob.size, start, stop)

    return send(blob.size, read, etag=blob.digest, close=blob.close)


def part_of_verified(chunks: Iterable[bytes], size: int, start: int, stop: int) -> Iterator[bytes]:
    """Yield a part of bytes that are read from the beginning, because reading verifies them."""
    place = 0
    for chunk in chunks:
        piece = chunk[max(0, start - place) : max(0, stop - place)]
        place += len(chunk)
        if piece:
            yield piece
        # At the very end the loop continues once more, so that the digest is verified.
        if place >= stop and stop < size:
            return


def select_range(header: str | None, size: int, headers: dict[str, str]) -> tuple[range, int]:
    """Return the bytes to send of ``size`` bytes, and the status; add range headers.

    Raises RangeNotSatisfiable.
    """
    span = parse_range(header, size)
    chosen = span or range(size)
    if span:
        headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{size}"
    headers["Content-Length"] = str(len(chosen))
    return chosen, 206 if span else 200


def _effective_range(etag: str) -> str | None:
    """Return the ``Range`` header, unless ``If-Range`` names another version."""
    condition = request.headers.get("If-Range")
    if condition is not None and condition.strip() != f'"{etag}"':
        return None
    return request.headers.get("Range")


def response_headers(etag: str, immutable: bool, public: bool = False) -> dict[str, str]:
    """Return the headers that all such answers have."""
    whose = "public" if public else "private"
    headers = {
        "Accept-Ranges": "bytes",
        "Cache-Control": f"{whose}, max-age=31536000, immutable" if immutable else "no-cache",
        # No browser may show a guest's data as if it were a page of ours.
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "sandbox; default-src 'none'",
    }
    if etag:
        headers["ETag"] = f'"{etag}"'
    return headers
