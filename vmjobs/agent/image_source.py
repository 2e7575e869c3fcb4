"""The images that the agent boots: a protocol, which ``images/`` implements."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vmjobs.file_transfer import ProgressCallback
from vmjobs.hypervisor.base import BootImage


@dataclass(frozen=True)
class LazyStart:
    """A request for an image from which a VM starts before its root disk is complete.

    socket: where to listen for readers of the root disk.
    failed: called, from any thread, with an error that makes the image unusable.
    """

    socket: Path
    failed: Callable[[Exception], object]


class ImageSource(Protocol):
    """Images on this node."""

    def prepare(self, digest: str, progress: ProgressCallback | None = None) -> BootImage:
        """Fetch the image unless it is cached, verify it, and return its files.

        Raises:
            NotFound: there is no such image.
            DigestMismatch: the received bytes do not match the digest.
            StorageFull: it does not fit onto this node.
        """

    def lease(
        self, digest: str, progress: ProgressCallback | None = None, lazy: LazyStart | None = None
    ) -> AbstractContextManager[BootImage]:
        """As :meth:`prepare`; the image is not evicted while the context lasts.

        lazy: the image may be incomplete (``BootImage.live``), if the source supports that.
        """

    def fetched(self, digest: str) -> int:
        """Bytes of the image that were fetched so far, by all runs together."""

    def cached(self) -> list[str]:
        """Digests of the cached images."""
