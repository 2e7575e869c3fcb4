"""Protocols for transferring the bytes of files to and from a repository, by chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from vmjobs.model import SavedFile

#: Called with (bytes done, bytes in all).
ProgressCallback = Callable[[int, int], None]


class ContentReceiver(Protocol):
    """An open upload at a repository. Safe to share between threads."""

    @property
    def id(self) -> str:
        """Its identifier at the repository."""

    def missing_segments(self, digests: Sequence[bytes]) -> list[bool]:
        """For each of these segments: whether it must be sent."""

    def missing_chunks(self, digests: Sequence[bytes]) -> list[bool]:
        """For each of these chunks: whether it must be sent."""

    def put_segment(self, digest: bytes, body: bytearray) -> bool:
        """Send a segment. Raises MissingChunks; DigestMismatch: a wrong chunk."""

    def put_content(self, digest: str, layout: bytes) -> None:
        """Send the list of a content's segments. Raises MissingChunks."""


class ContentSource(Protocol):
    """Contents at a repository; the caller verifies their bytes."""

    def layout(self, content: str) -> bytes:
        """The layout of a content. Raises NotFound."""

    def segment(self, segment: bytes) -> bytes:
        """A stored segment, by its digest's 32 bytes. Raises NotFound."""


class FileTransfer(Protocol):
    """Transfers files to and from a repository, by chunks."""

    def send(
        self, path: Path, receiver: ContentReceiver, check_cancelled: Callable[[], None]
    ) -> tuple[str, int]:
        """Send a file; returns its content's digest, and the number of bytes sent.

        check_cancelled: called repeatedly, from any thread; an exception that it raises ends the call.

        Raises:
            InvalidRequest: the file is unreadable. Others: those of the receiver.
        """

    def fetch(
        self, file: SavedFile, source: ContentSource, target: Path, check_cancelled: Callable[[], None]
    ) -> int:
        """Fetch a file, verified and sparse; returns the number of bytes fetched.

        check_cancelled: see :meth:`send`.

        Raises:
            NotFound, Unavailable: those of the source. DigestMismatch, StorageFull.
            InvalidRequest: the file cannot be written.
        """
