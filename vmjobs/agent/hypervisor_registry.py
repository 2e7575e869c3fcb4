"""Probes the node's hypervisors, chooses one for a VM, probes again after failures."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from vmjobs import __version__
from vmjobs.hypervisor.base import Hypervisor, ProbeResult, VmNeeds
from vmjobs.hypervisor.select import choose
from vmjobs.model import HypervisorKind

log = logging.getLogger(__name__)

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_RESULTS = TypeAdapter(tuple[str, tuple[ProbeResult, ...]])


class HypervisorRegistry:
    """Drivers in order of preference, and the results of their probes.

    seconds: deadline of a probe.
    cache: file that keeps results between processes, until the host reboots or vmjobs changes.
    """

    def __init__(
        self,
        drivers: Mapping[HypervisorKind, Hypervisor],
        seconds: float,
        cache: Path | None = None,
    ) -> None:
        self.drivers = dict(drivers)
        self._seconds = seconds
        self._cache = cache
        self._results: tuple[ProbeResult, ...] = ()
        self._lock = threading.Lock()
        self._probed: dict[HypervisorKind, float] = {}
        self._worked: set[HypervisorKind] = set()
        #: Called when a hypervisor has stopped working, before :meth:`reprobe` returns.
        self.on_loss: Callable[[], object] = lambda: None

    def probe(self) -> tuple[ProbeResult, ...]:
        """Boot a tiny guest on each hypervisor, all at once, and keep the results."""
        with self._lock:
            self._results = self._probe_kinds(tuple(self.drivers))
            self._save()
        return self.results

    def reprobe_failing(self, *, only_likely: bool = False) -> None:
        """Probe failing hypervisors again: a new image may have a kernel they can boot.

        only_likely: only those that worked before, or were too slow: the node may have been busy.
        """
        with self._lock:
            failing = [result for result in self._results if not result.works]
            self._reprobe(
                result.kind
                for result in failing
                if not only_likely or result.is_slow or result.kind in self._worked
            )

    def reprobe(self, kind: HypervisorKind) -> ProbeResult:
        """Probe a hypervisor again that failed to start a VM.

        If it fails, the node takes no more jobs for it. Of several concurrent calls one probes.
        """
        asked = time.monotonic()
        with self._lock:
            worked = any(result.kind is kind and result.works for result in self._results)
            if self._probed.get(kind, -math.inf) < asked:
                self._reprobe([kind])
            found = next(result for result in self._results if result.kind is kind)
        if worked and not found.works:
            self.on_loss()
        return found

    def _reprobe(self, kinds: Iterable[HypervisorKind]) -> None:
        again = {result.kind: result for result in self._probe_kinds(tuple(kinds))}
        self._results = tuple(again.get(result.kind, result) for result in self._results)

    def _probe_kinds(self, kinds: tuple[HypervisorKind, ...]) -> tuple[ProbeResult, ...]:
        self._probed.update(dict.fromkeys(kinds, time.monotonic()))
        with ThreadPoolExecutor(max_workers=max(1, len(kinds))) as pool:
            found = tuple(pool.map(lambda kind: self.drivers[kind].probe(self._seconds), kinds))
        self._worked |= {result.kind for result in found if result.works}
        for result in found:  # at info: a node needs only one that works; `vmjobs run` reports failures
            log.info("%s: %s", result.kind, result.detail)
        return found

    @property
    def results(self) -> tuple[ProbeResult, ...]:
        drivers = self.drivers
        return tuple(replace(one, abilities=drivers[one.kind].abilities) for one in self._results)

    def choose(self, needs: VmNeeds) -> Hypervisor:
        """Return the first driver that can boot the VM, or the demanded one.

        Raises:
            NoHypervisor: there is none; the message has each probe's result.
        """
        if not self._results:
            self._results = self._load()
            if not self._results:
                self.probe()
        return self.drivers[choose(tuple(self.drivers), needs, self.results)]

    def _save(self) -> None:
        if self._cache is None:
            return
        self._cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._cache.with_suffix(".tmp")
        temporary.write_bytes(_RESULTS.dump_json((self._key(), self._results)))
        temporary.replace(self._cache)

    def _load(self) -> tuple[ProbeResult, ...]:
        """Return cached results if they are of this boot, release and list of drivers."""
        if self._cache is None:
            return ()
        try:
            key, results = _RESULTS.validate_json(self._cache.read_bytes())
        except (OSError, ValidationError):
            return ()
        is_usable = any(result.works for result in results)
        return results if is_usable and key == self._key() else ()

    def _key(self) -> str:
        kinds = ",".join(self.drivers)
        return f"{__version__} {kinds} {BOOT_ID_FILE.read_text('ascii').strip()}"
