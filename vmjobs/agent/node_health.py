"""Health of a node, from the outcomes of its recent jobs. No I/O.

=======  ==================================================  ===================================
state    a job fails because of the node                     a job ends by itself
=======  ==================================================  ===================================
fit      counts; the third in a row: resting                 counts from 0 again
resting  (it ran already) nothing                            fit
=======  ==================================================  ===================================

A rest ends by time alone. Then jobs come again, and the next failure begins a rest of twice the length.
Failures of a job's own making, or of its image, never count: else a user with a bad image could keep
others from the node.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from vmjobs.agent.run.outcome import RunOutcome
from vmjobs.model import ReasonCode, now

#: Failures in a row that begin a rest.
FAILURE_LIMIT: Final = 3
#: Seconds of the first rest in a row, and of the longest.
FIRST_REST_SECONDS: Final = 30.0
LONGEST_REST_SECONDS: Final = 3600.0
#: Seconds between two probes of a hypervisor: images of users may fail to boot at any rate.
REPROBE_SECONDS: Final = 300.0
#: VMs that started but did not boot: a fault of the image or of the hypervisor.
_NOT_BOOTED: Final = frozenset({ReasonCode.BOOT_FAILED, ReasonCode.BOOT_TIMED_OUT})


class NodeHealth:
    """Whether a node is fit for jobs.

    on_rest: called when a rest begins. clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_rest: Callable[[], object] = lambda: None
        self._clock = clock
        self._lock = threading.Lock()
        self._failed = self._rests = self._unbooted = 0
        self._rest_until = self._no_probe_until = -math.inf
        self._fault = ""

    def count_run(self, outcome: RunOutcome) -> bool:
        """Count a run that has ended. True: VMs do not boot, so probe the hypervisor."""
        if outcome.node_at_fault:
            self.count_failure()
        elif outcome.exit is not None:
            with self._lock:
                self._failed = self._rests = self._unbooted = 0
                self._rest_until = -math.inf
        if outcome.reason.code not in _NOT_BOOTED:
            return False
        with self._lock:
            self._unbooted += 1
            if self._unbooted < FAILURE_LIMIT or self._clock() < self._no_probe_until:
                return False
            self._unbooted, self._no_probe_until = 0, self._clock() + REPROBE_SECONDS
            return True

    def count_failure(self) -> None:
        """Count a job that failed because of the node."""
        with self._lock:
            if self._is_resting():
                return
            self._failed += 1
            if self._failed < FAILURE_LIMIT:
                return
            seconds = min(FIRST_REST_SECONDS * 2 ** min(self._rests, 16), LONGEST_REST_SECONDS)
            self._rests += 1
            self._rest_until = self._clock() + seconds
            until = (now() + timedelta(seconds=seconds)).isoformat(timespec="seconds")
            self._fault = (
                f"{self._failed} jobs in a row failed because of this node; it takes no jobs until "
                f"{until} (see the agent's log)"
            )
        self.on_rest()

    def fault(self) -> str:
        """Why the node takes no jobs now; "": it takes them."""
        with self._lock:
            return self._fault if self._is_resting() else ""

    def _is_resting(self) -> bool:
        return self._clock() < self._rest_until
