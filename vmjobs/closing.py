"""What is closed at the end of a ``with``."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """Base of what has a ``close()``: usable in a ``with``, which closes it."""

    def close(self) -> None:
        """Give back what this holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
