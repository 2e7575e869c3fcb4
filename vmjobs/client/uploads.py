"""Open uploads: what sends the parts of images, and machines that were saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from vmjobs.client.transport import Packet, Transport
from vmjobs.errors import NotFound, Unavailable
from vmjobs.wire import MAX_DIGESTS, Upload

BYTES_HEADERS: Final = {"Content-Type": "application/octet-stream"}


class UploadClient:
    """An open upload (an ``images.push.Receiver``). Safe to share between threads."""

    def __init__(self, http: Transport, about: Upload) -> None:
        self._http = http
        self._path = f"/v1/uploads/{part_of(about.id)}"
        self.about = about

    @property
    def id(self) -> str:
        """The upload's identifier."""
        return self.about.id

    def drop(self) -> None:
        """Give the upload up."""
        self._http.call("DELETE", self._path)

    def missing_segments(self, digests: Sequence[bytes]) -> list[bool]:
        """Which of these segments have to be sent."""
        return self._missing("segments", digests)

    def missing_blocks(self, digests: Sequence[bytes]) -> list[bool]:
        """Which of these blocks have to be sent."""
        return self._missing("blocks", digests)

    def _missing(self, what: str, digests: Sequence[bytes]) -> list[bool]:
        flags = b""
        for at in range(0, len(digests), MAX_DIGESTS):
            body = b"".join(digests[at : at + MAX_DIGESTS])
            path = f"{self._path}/missing-{what}"
            answer = self._http.call("POST", path, body=body, headers=BYTES_HEADERS, repeatable=True)
            flags += answer.content
        if len(flags) != len(digests):
            raise Unavailable("api", "the API answers another question than the one it was asked")
        return [flag != 0 for flag in flags]

    def put_segment(self, digest: bytes, body: bytearray) -> bool:
        """Send a segment; whether it was new.

        Raises:
            MissingBlocks: a block that was left out is not there; send all of them.
        """
        path = f"{self._path}/segments/{digest.hex()}"
        answer = self._http.call("PUT", path, body=Packet(body), headers=BYTES_HEADERS)
        return answer.status_code == 201

    def put_content(self, digest: str, layout: bytes) -> None:
        """Say of which segments a content consists.

        Raises:
            MissingBlocks: not all of them are there.
        """
        path = f"{self._path}/contents/{part_of(digest)}"
        self._http.call("PUT", path, body=Packet(layout), headers=BYTES_HEADERS)


def part_of(text: str, safe: str = ":") -> str:
    """Text as a part of a path. Dots alone would be resolved before anybody could refuse them."""
    if not text.strip() or any(part in {"", ".", ".."} for part in text.split("/")):
        raise NotFound(f"there is nothing called {text!r}")
    return quote(text, safe=safe)
