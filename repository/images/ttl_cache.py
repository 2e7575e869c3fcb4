"""A cache whose entries are valid for a few seconds, for queries that repeat often."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TtlCache(Generic[K, V]):
    """Caches at most ``limit`` entries, each for ``seconds``. Safe to share between threads."""

    def __init__(self, seconds: float, limit: int, clock: Callable[[], float]) -> None:
        self.seconds: Final = seconds
        self.limit: Final = limit
        self.clock: Final = clock
        self._lock = threading.Lock()
        # All are valid equally long: they expire in the order of insertion.
        self._kept: dict[K, tuple[float, V]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K) -> V | None:
        """Return the value, if there is a valid one."""
        found = self._kept.get(key)
        return found[1] if found is not None and self.clock() < found[0] else None

    def keep(self, answers: Iterable[tuple[K, V]], asked: float) -> None:
        """Add the results of a query made at ``asked``, by :attr:`clock`; drop the oldest entries."""
        end = asked + self.seconds
        with self._lock:
            for key, value in answers:
                self._kept.pop(key, None)
                self._kept[key] = (end, value)
            while len(self._kept) > self.limit:
                del self._kept[next(iter(self._kept))]
