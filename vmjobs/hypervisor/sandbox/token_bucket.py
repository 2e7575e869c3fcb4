"""Token bucket: limits the average rate of something, without any I/O.

A bucket fills at its rate up to its capacity, and use is taken out. Something indivisible, such as a
frame or a slice of processor time, may overdraw it: the debt is paid before more may be used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class TokenBucket:
    """A token bucket, full at first.

    rate: units per second. burst: capacity, in seconds' worth, which may be used at once after a rest.
    clock: monotonic seconds.
    """

    rate: float
    burst: float
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._level = self.capacity
        self._updated = self.clock()

    @property
    def capacity(self) -> float:
        """The capacity, in units."""
        return self.rate * self.burst

    @property
    def level(self) -> float:
        """Units that may be used now; negative: a debt."""
        now = self.clock()
        self._level = min(self.capacity, self._level + (now - self._updated) * self.rate)
        self._updated = now
        return self._level

    def take(self, amount: float) -> None:
        """Use ``amount`` units; what exceeds the level becomes a debt."""
        self._level = self.level - amount

    def wait(self) -> float:
        """Seconds until a debt is paid; 0: there is none."""
        return max(0.0, -self.level / self.rate)
