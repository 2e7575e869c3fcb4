"""Sends files to a repository and fetches them: a ``vmjobs.file_transfer.FileTransfer``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from images.transfer.pull import pull_file
from images.transfer.push import send_content
from vmjobs.errors import NotFound
from vmjobs.file_transfer import ContentReceiver, ContentSource
from vmjobs.model import SavedFile

#: In place of an image's digest: the content belongs to no image.
_NO_IMAGE = ""


class ChunkedFileTransfer:
    """Sends the chunks that the repository lacks; fetches whole files."""

    def send(
        self, path: Path, receiver: ContentReceiver, check_cancelled: Callable[[], None]
    ) -> tuple[str, int]:
        sent = 0

        def on_progress(_done: int, sent_bytes: int) -> None:
            nonlocal sent
            sent = sent_bytes
            check_cancelled()

        return send_content(path, receiver, on_progress=on_progress).digest, sent

    def fetch(
        self, file: SavedFile, source: ContentSource, target: Path, check_cancelled: Callable[[], None]
    ) -> int:
        if file.digest is None:
            target.touch()
            return 0
        fetcher = _SourceFetcher(source)
        pull_file(target, fetcher, _NO_IMAGE, file.digest, file.size, lambda _done: check_cancelled())
        return fetcher.fetched


class _SourceFetcher:
    """Adapts a source to ``images.transfer.remote.ImageFetcher``; counts the fetched bytes."""

    def __init__(self, source: ContentSource) -> None:
        self._source = source
        self.fetched = 0

    def manifest(self, digest: str) -> bytes:
        raise NotFound(f"there is no image {digest!r}")

    def signature(self, _digest: str) -> str:
        return ""

    def layout(self, _image: str, content: str) -> bytes:
        return self._source.layout(content)

    def segment(self, _image: str, segment: bytes) -> bytes:
        body = self._source.segment(segment)
        self.fetched += len(body)
        return body

    def segment_range(self, image: str, segment: bytes, begin: int, end: int) -> tuple[bytes, int]:
        whole = self.segment(image, segment)
        return whole[begin:end], len(whole)
