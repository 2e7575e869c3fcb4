"""Open uploads, which receive the data of images and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from vmjobs.client.request_bodies import BytesBody
from vmjobs.client.transport import BYTES_HEADERS, ApiTransport
from vmjobs.errors import NotFound, Unavailable
from vmjobs.wire import MAX_DIGESTS, Upload


class UploadClient:
    """An open upload (a ``vmjobs.file_transfer.ContentReceiver``). Safe to share between threads."""

    def __init__(self, http: ApiTransport, about: Upload) -> None:
        self._http = http
        self._path = f"/v1/uploads/{quote_path(about.id)}"
        self.about = about

    @property
    def id(self) -> str:
        return self.about.id

    def drop(self) -> None:
        self._http.call("DELETE", self._path)

    def missing_segments(self, digests: Sequence[bytes]) -> list[bool]:
        """For each of these segments: whether it must be sent."""
        return self._missing("segments", digests)

    def missing_chunks(self, digests: Sequence[bytes]) -> list[bool]:
        """For each of these chunks: whether it must be sent."""
        return self._missing("blocks", digests)

    def _missing(self, what: str, digests: Sequence[bytes]) -> list[bool]:
        flags = b""
        for at in range(0, len(digests), MAX_DIGESTS):
            body = b"".join(digests[at : at + MAX_DIGESTS])
            path = f"{self._path}/missing-{what}"
            answer = self._http.call("POST", path, body=body, headers=BYTES_HEADERS, repeatable=True)
            flags += answer.content
        if len(flags) != len(digests):
            raise Unavailable("api", "the API answered about another number of digests than requested")
        return [flag != 0 for flag in flags]

    def put_segment(self, digest: bytes, body: bytearray) -> bool:
        """Send a segment; returns whether it was new.

        Raises:
            MissingChunks: the service lacks a chunk that was left out; send all of them.
        """
        path = f"{self._path}/segments/{digest.hex()}"
        answer = self._http.call("PUT", path, body=BytesBody(body), headers=BYTES_HEADERS)
        return answer.status_code == 201

    def put_content(self, digest: str, layout: bytes) -> None:
        """Send the list of a content's segments.

        Raises:
            MissingChunks: the service lacks some of them.
        """
        path = f"{self._path}/contents/{quote_path(digest)}"
        self._http.call("PUT", path, body=BytesBody(layout), headers=BYTES_HEADERS)


def quote_path(text: str, safe: str = ":") -> str:
    """Quote text for a path; refuses dots alone, which the HTTP client would resolve."""
    if not text.strip() or any(part in {"", ".", ".."} for part in text.split("/")):
        raise NotFound(f"{text!r}: not found")
    return quote(text, safe=safe)
