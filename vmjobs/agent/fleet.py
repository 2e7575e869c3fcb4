"""The hypervisors of a node: probed once, then chosen from."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from vmjobs.hypervisor.base import Hypervisor, ProbeResult
from vmjobs.hypervisor.select import choose
from vmjobs.model import HypervisorKind

log = logging.getLogger(__name__)


class Fleet:
    """Drivers in order of preference, and what their probes found.

    seconds: deadline of a probe.
    """

    def __init__(self, drivers: Mapping[HypervisorKind, Hypervisor], seconds: float) -> None:
        self.drivers = dict(drivers)
        self._seconds = seconds
        self._results: dict[HypervisorKind, ProbeResult] = {}
        self._lock = threading.Lock()

    def probe(self) -> tuple[ProbeResult, ...]:
        """Boot a tiny guest on each hypervisor, all at once; the results are kept."""
        with self._lock:
            with ThreadPoolExecutor(max_workers=max(1, len(self.drivers))) as pool:
                found = list(
                    pool.map(lambda driver: driver.probe(self._seconds), self.drivers.values())
                )
            for result in found:
                level = logging.INFO if result.works else logging.WARNING
                log.log(level, "%s: %s", result.kind, result.detail)
            self._results = {result.kind: result for result in found}
        return tuple(found)

    @property
    def results(self) -> tuple[ProbeResult, ...]:
        """What the last probe found."""
        return tuple(self._results.values())

    def choose(self, demanded: HypervisorKind | None) -> Hypervisor:
        """The best driver that works, or the demanded one.

        Raises:
            NoHypervisor: there is none; the message has each probe's finding.
        """
        if not self._results:
            self.probe()
        return self.drivers[choose(tuple(self.drivers), demanded, self.results)]
