"""Base class of objects that a ``with`` statement closes."""

from __future__ import annotations

from typing import Self


class Closeable:
    """Base of classes with ``close()``: leaving their ``with`` statement calls it."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
