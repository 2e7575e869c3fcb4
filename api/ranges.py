"""Serves bytes over HTTP, whole or a range (RFC 9110), without loading them all."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, Final, Protocol, cast

from flask import request
from werkzeug.wrappers import Response
from werkzeug.wsgi import wrap_file

from api.operation import BinaryBody, Reply, RequestHeader
from api.problems import RangeNotSatisfiable
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


class Source(Protocol):
    """Bytes of a known size."""

    @property
    def size(self) -> int:
        """The number of bytes."""

    def chunks(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from ``start`` up to, not including, ``stop``."""


class SequentialSource(Protocol):
    """Bytes that can be read only from the beginning, because reading verifies them."""

    size: int

    def __iter__(self) -> Iterator[bytes]: ...


class RangeReader:
    """A :class:`Source` of a :class:`SequentialSource`; skips what precedes a range."""

    def __init__(self, whole: SequentialSource) -> None:
        self._source = whole
        self.size = whole.size

    def chunks(self, start: int, stop: int) -> Iterator[bytes]:
        """See :class:`Source`."""
        place = 0
        for chunk in self._source:
            piece = chunk[max(0, start - place) : max(0, stop - place)]
            place += len(chunk)
            if piece:
                yield piece
            # At the very end the loop continues once more, so that the digest is verified.
            if place >= stop and stop < self.size:
                return


class MemorySource:
    """A :class:`Source` of a few bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def chunks(self, start: int, stop: int) -> Iterator[bytes]:
        """See :class:`Source`."""
        yield self._data[start:stop]


class _ObjectFile(io.FileIO):
    """The file of a stored object; closing it closes the object."""

    def __init__(self, path: Path, reader: ObjectReader) -> None:
        self._reader = reader
        super().__init__(path)

    def close(self) -> None:
        super().close()
        self._reader.close()


class ObjectSource:
    """A :class:`Source` of a stored object. ``file``: set if the kernel can send it."""

    def __init__(self, reader: ObjectReader) -> None:
        self._reader = reader
        self.size = reader.size
        self.file: _ObjectFile | None = None
        if reader.path is not None:
            # Fails if the file was moved away since: the reader still has it, and copies.
            with suppress(OSError):
                self.file = _ObjectFile(reader.path, reader)

    def chunks(self, start: int, stop: int) -> Iterator[bytes]:
        """See :class:`Source`."""
        self._reader.seek(start)
        left = stop - start
        while left > 0 and (data := self._reader.read(min(READ_BYTES, left))):
            left -= len(data)
            yield data

    def close(self) -> None:
        """Close the object."""
        (self.file or self._reader).close()


class ComputedSource:
    """A :class:`Source` of bytes that a function makes, by offset and length."""

    def __init__(self, size: int, read: Callable[[int, int], Iterator[bytes]]) -> None:
        self.size = size
        self._read = read

    def chunks(self, start: int, stop: int) -> Iterator[bytes]:
        """See :class:`Source`."""
        return self._read(start, stop - start)


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
    source: Source,
    *,
    etag: str = "",
    immutable: bool = False,
    public: bool = False,
    close: Callable[[], None] = lambda: None,
) -> Response:
    """Answer with ``source`` or the requested range of it, and then call ``close``.

    etag: a digest of the whole body, if it has one. immutable: it never changes. public: shared caches
    may keep it if it is immutable.
    """
    try:
        headers = response_headers(etag, immutable, public)
        if etag and request.if_none_match.contains(etag):
            close()
            return Response(status=304, headers=headers)
        chosen, status = select_range(_effective_range(etag), source.size, headers)
        if (file := getattr(source, "file", None)) is not None and FILE_WRAPPER in request.environ:
            return _sendfile_response(file, chosen, status, headers)
        pieces = source.chunks(chosen.start, chosen.stop)
        # Read before the headers are sent: a small damaged file is answered with its problem document.
        # A large one breaks off, and the client notices by its digest.
        first = next(pieces, b"")
    except BaseException:
        close()
        raise
    response = Response(chain([first], pieces), status, headers, content_type=OCTET_STREAM)
    response.call_on_close(close)
    return response


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


def _sendfile_response(
    file: _ObjectFile, span: range, status: int, headers: dict[str, str]
) -> Response:
    """Answer with bytes that the kernel copies; the server closes ``file``."""
    file.seek(span.start)
    return Response(
        wrap_file(request.environ, cast(IO[bytes], file)),
        status,
        headers,
        content_type=OCTET_STREAM,
        direct_passthrough=True,
    )


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
