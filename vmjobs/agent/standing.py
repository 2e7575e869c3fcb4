"""Whether a node is fit for jobs: not for a while once it has failed several in a row. No I/O.

=======  ==================================================  ===================================
state    a job that the node fails                           a job that comes to its own end
=======  ==================================================  ===================================
fit      counts; the third in a row: resting                 counts from 0 again
resting  (one that ran already) nothing                      fit
=======  ==================================================  ===================================

A rest ends by time alone. Then jobs come again; the first that the node fails makes it rest for twice
as long. What a job does to itself, or its image to its machine, never counts: else whoever brings a bad
image could keep others from the node.
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

#: So many in a row are one too many.
LIMIT: Final = 3
#: Seconds of the first rest in a row, and of any at most.
FIRST_REST: Final = 30.0
LONGEST_REST: Final = 3600.0
#: Seconds from one doubt to the next: users make images that do not boot, and each has a probe boot.
DOUBT_SECONDS: Final = 300.0
#: Of machines that a hypervisor has started and that came to nothing, by an image's fault or its own.
_NOT_BOOTED: Final = frozenset({ReasonCode.BOOT_FAILED, ReasonCode.BOOT_TIMED_OUT})


class Standing:
    """What a node's last jobs say of it.

    on_rest: called when a rest begins. clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_rest: Callable[[], object] = lambda: None
        self._clock = clock
        self._lock = threading.Lock()
        self._failed = self._rests = self._unbooted = 0
        self._until = self._sure_until = -math.inf
        self._fault = ""

    def note(self, verdict: Verdict) -> bool:
        """A run has ended. Whether its hypervisor is in doubt: machines in a row did not boot."""
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
        """The node has failed a job."""
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
                f"{self._failed} jobs in a row failed for the node's sake; it rests until {until} (the "
                "agent's log says why)"
            )
        self.on_rest()

    def fault(self) -> str:
        """Why the node is to get no jobs now; "": it is fit for them."""
        with self._lock:
            return self._fault if self._resting() else ""

    def _resting(self) -> bool:
        return self._clock() < self._until
