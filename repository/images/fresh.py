"""Answers that hold for a few seconds, so that what is asked a thousand times is asked once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Fresh(Generic[K, V]):
    """At most ``limit`` answers, each for ``seconds`` and no longer. Safe to share between threads."""

    def __init__(self, seconds: float, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: Final = seconds
        self.limit: Final = limit
        self.clock: Final = clock
        self._lock = threading.Lock()
        # All hold equally long: the order in which they came is the order in which they end.
        self._kept: dict[K, tuple[float, V]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K) -> V | None:
        """The answer, if there is one that still holds."""
        found = self._kept.get(key)
        return found[1] if found is not None and self.clock() < found[0] else None

    def keep(self, answers: Iterable[tuple[K, V]], asked: float) -> None:
        """Keep answers to what was asked at ``asked``, by :attr:`clock`; the oldest make room."""
        end = asked + self.seconds
        with self._lock:
            for key, value in answers:
                self._kept.pop(key, None)
                self._kept[key] = (end, value)
            while len(self._kept) > self.limit:
                del self._kept[next(iter(self._kept))]
