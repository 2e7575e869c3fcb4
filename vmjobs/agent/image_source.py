"""Protocols for the images that the agent boots. ``images/`` implements them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vmjobs.file_transfer import ProgressCallback
from vmjobs.hypervisor.base import BootImage
from vmjobs.model import JobTicket


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
        self, digest: str, progress: ProgressCallback | None = None
    ) -> AbstractContextManager[BootImage]:
        """As :meth:`prepare`; the image is not evicted while the context lasts."""

    def fetched(self, digest: str) -> int:
        """Bytes of the image that were fetched so far, by all runs together."""

    def cached(self) -> list[str]:
        """Digests of the cached images."""


@dataclass(frozen=True)
class LazyImage:
    """An image that a VM can boot before its root disk is complete.

    ready: must be called once the guest is ready; then the rest of the disk is fetched.
    waiting: whether a VM waits for a part of the disk now.
    waited: seconds that VMs have waited.
    """

    image: BootImage
    ready: Callable[[], object] = lambda: None
    waiting: Callable[[], bool] = lambda: False
    waited: Callable[[], float] = lambda: 0.0


class LazyImageSource(Protocol):
    """Images that VMs boot before they are complete (setting ``lazy_start``)."""

    def live(
        self,
        digest: str,
        socket: Path,
        failed: Callable[[Exception], object],
        progress: ProgressCallback | None = None,
    ) -> AbstractContextManager[LazyImage]:
        """Lease the image while the context lasts. Raises as :meth:`ImageSource.lease`.

        socket: where to listen for readers of the root disk.
        failed: called, from any thread, with an error that makes the image unusable.
        """


class SeedWriter(Protocol):
    """Writes cloud-init data for images that use it."""

    def write(self, path: Path, ticket: JobTicket) -> None:
        """Write the disk with the job's NoCloud data.

        Raises:
            HypervisorError: the disk cannot be made.
        """
