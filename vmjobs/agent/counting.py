"""Counts what a run has moved and used, as far as that can be seen now."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import Hypervisor, Usage
from vmjobs.model import StreamName

log = logging.getLogger(__name__)


@dataclass
class Tally:
    """What a run has moved and used so far. Numbers only grow, whoever counts, and when.

    bytes: by name, see :data:`vmjobs.model.AMOUNTS`.
    """

    bytes: dict[str, int] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reached(self, name: str, amount: int) -> None:
        """There are so many bytes by now."""
        with self._lock:
            self.bytes[name] = max(self.bytes.get(name, 0), amount)

    def add(self, name: str, amount: int) -> None:
        """There are so many bytes more."""
        with self._lock:
            self.bytes[name] = self.bytes.get(name, 0) + amount

    def used(self, usage: Usage, memory: int) -> None:
        """The machine has used this. memory: bytes that it has: what is beyond is not its own."""
        self.reached("memory", min(usage.memory, memory))
        with self._lock:
            self.cpu_seconds = max(self.cpu_seconds, usage.cpu_seconds)


def count_machine(tally: Tally, driver: Hypervisor, name: str, memory: int) -> None:
    """Count what a machine has used: before it is destroyed, which forgets it. memory: see above."""
    try:
        tally.used(driver.usage(name), memory)
    except (HypervisorError, OSError) as error:
        log.warning("what %s has used is not known: %s", name, error)


def count_files(tally: Tally, directory: Path, stream: Callable[[StreamName], Path]) -> None:
    """Count what lies in a run's directory: what its machine wrote, and what it said."""
    wrote = [directory / "scratch.disk", directory / "output.disk", *_below(directory / "machine")]
    tally.reached("disk", _sum(wrote, lambda found: found.st_blocks * 512))
    console = [stream(StreamName.CONSOLE)]
    tally.reached("console", _sum(console, lambda found: found.st_size))
    log = [stream(StreamName.OUT), stream(StreamName.ERR)]
    tally.reached("log", _sum(log, lambda found: found.st_size))


def _below(directory: Path) -> list[Path]:
    return [Path(place) / name for place, _, names in os.walk(directory) for name in names]


def _sum(paths: Iterable[Path], measure: Callable[[os.stat_result], int]) -> int:
    total = 0
    for path in paths:
        with suppress(OSError):  # it is not there (any more)
            total += measure(path.lstat())
    return total
