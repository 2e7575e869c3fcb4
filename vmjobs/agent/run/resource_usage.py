"""Measures the resources that a run has used so far."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import Hypervisor, VmUsage
from vmjobs.model import StreamName

log = logging.getLogger(__name__)


@dataclass
class ResourceUsage:
    """The resources that a run has used so far. The numbers only grow.

    bytes: by name, see :data:`vmjobs.model.BYTE_COUNTERS`.
    """

    bytes: dict[str, int] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def raise_to(self, name: str, amount: int) -> None:
        with self._lock:
            self.bytes[name] = max(self.bytes.get(name, 0), amount)

    def add(self, name: str, amount: int) -> None:
        with self._lock:
            self.bytes[name] = self.bytes.get(name, 0) + amount

    def add_vm_usage(self, usage: VmUsage, memory: int) -> None:
        """Add the VM's usage. memory: of the VM, in bytes; more than that is the hypervisor's."""
        self.raise_to("memory", min(usage.memory, memory))
        with self._lock:
            self.cpu_seconds = max(self.cpu_seconds, usage.cpu_seconds)


def measure_vm(usage: ResourceUsage, driver: Hypervisor, name: str, memory: int) -> None:
    """Measure the VM, before it is destroyed. memory: of the VM, in bytes."""
    try:
        usage.add_vm_usage(driver.usage(name), memory)
    except (HypervisorError, OSError) as error:
        log.warning("resource usage of %s is unknown: %s", name, error)


def measure_files(usage: ResourceUsage, directory: Path, stream: Callable[[StreamName], Path]) -> None:
    """Measure the files in a run's directory: disks, console and logs."""
    wrote = [directory / "scratch.disk", directory / "output.disk", *_below(directory / "machine")]
    usage.raise_to("disk", _sum(wrote, lambda found: found.st_blocks * 512))
    console = [stream(StreamName.CONSOLE)]
    usage.raise_to("console", _sum(console, lambda found: found.st_size))
    log = [stream(StreamName.OUT), stream(StreamName.ERR)]
    usage.raise_to("log", _sum(log, lambda found: found.st_size))


def _below(directory: Path) -> list[Path]:
    return [Path(place) / name for place, _, names in os.walk(directory) for name in names]


def _sum(paths: Iterable[Path], measure: Callable[[os.stat_result], int]) -> int:
    total = 0
    for path in paths:
        with suppress(OSError):  # it is not there (any more)
            total += measure(path.lstat())
    return total
