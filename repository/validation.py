"""Whether a job can be run at all: limits of the service and what live nodes offer."""

from __future__ import annotations

from typing import Protocol


class ImageResolver(Protocol):
    """What is needed of an image store (``images.store.ImageStore`` is one)."""

    def resolve(self, ref: str) -> str:
        """The digest of the image that a name, ``name:tag`` or digest stands for.

        Raises NotFound.
        """
