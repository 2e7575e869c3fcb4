"""How much of something may be used in a time: the arithmetic of limits, without any I/O.

A bucket fills at its rate, up to what fits, and what is used is taken out. It may be overdrawn by
what cannot be had in parts, a frame or a slice of processor time: the debt is paid before more is had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Bucket:
    """A token bucket, full at first.

    rate: units a second. burst: seconds' worth that fits into it, to be used at once after a rest.
    clock: seconds, never set back.
    """

    rate: float
    burst: float
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._level = self.most
        self._seen = self.clock()

    @property
    def most(self) -> float:
        """What fits into it."""
        return self.rate * self.burst

    @property
    def level(self) -> float:
        """What may be used now; below zero: a debt."""
        now = self.clock()
        self._level = min(self.most, self._level + (now - self._seen) * self.rate)
        self._seen = now
        return self._level

    def take(self, amount: float) -> None:
        """Use some; more than there is becomes a debt."""
        self._level = self.level - amount

    def wait(self, level: float = 0.0) -> float:
        """Seconds until more than ``level`` is in it; 0: it is."""
        return max(0.0, (level - self.level) / self.rate)
