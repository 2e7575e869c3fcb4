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

from vmjobs.agent.verdict import Verdict
from vmjobs.model import ReasonCode, now

#: Failures in a row that begin a rest.
LIMIT: Final = 3
#: Seconds of the first rest in a row, and of the longest.
FIRST_REST: Final = 30.0
LONGEST_REST: Final = 3600.0
#: Seconds between two probes of a hypervisor: images of users may fail to boot at any rate.
DOUBT_SECONDS: Final = 300.0
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
        self._until = self._sure_until = -math.inf
        self._fault = ""

    def note(self, verdict: Verdict) -> bool:
        """Count a run that has ended. True: VMs do not boot, so probe the hypervisor."""
        if verdict.unfit:
            self.failed()
        elif verdict.exit is not None:
            with self._lock:
                self._failed = self._rests = self._unbooted = 0
                self._until = -math.inf
        if verdict.reason.code not in _NOT_BOOTED:
            return False
        with self._lock:
            self._unbooted += 1
            if self._unbooted < LIMIT or self._clock() < self._sure_until:
                return False
            self._unbooted, self._sure_until = 0, self._clock() + DOUBT_SECONDS
            return True

    def failed(self) -> None:
        """Count a job that failed because of the node."""
        with self._lock:
            if self._resting():
                return
            self._failed += 1
            if self._failed < LIMIT:
                return
            seconds = min(FIRST_REST * 2 ** min(self._rests, 16), LONGEST_REST)
            self._rests += 1
            self._until = self._clock() + seconds
            until = (now() + timedelta(seconds=seconds)).isoformat(timespec="seconds")
            self._fault = (
                f"{self._failed} jobs in a row failed because of this node; it takes no jobs until "
                f"{until} (see the agent's log)"
            )
        self.on_rest()

    def fault(self) -> str:
        """Why the node takes no jobs now; "": it takes them."""
        with self._lock:
            return self._fault if self._resting() else ""

    def _resting(self) -> bool:
        return self._clock() < self._until
