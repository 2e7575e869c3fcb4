"""What a run has observed of its job: times, its end, and how it may be controlled now."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from vmjobs.agent.run.outputs import DiskContents
from vmjobs.agent.vm.events import ConsoleLineMatched, ExitReported, RunEvent, ScriptEnded
from vmjobs.hypervisor.base import ShutdownCause
from vmjobs.model import CONSOLE_RULE, ExitChannel, ExitStatus


@dataclass
class Observations:
    """How the job of a run ends, as observed so far. Only :mod:`vmjobs.agent.run.monitor` writes it.

    reported_exit: the exit status that the guest reported. undelivered: it could not send all outputs.
    exit_line: the console line that ends the job. disk: contents of the output disk, once it was read.
    """

    script_ended: ScriptEnded | None = None
    reported_exit: ExitStatus | None = None
    undelivered: bool = False
    exit_line: ConsoleLineMatched | None = None
    shutdown_cause: ShutdownCause | None = None
    disk: DiskContents | None = None

    def record(self, seen: RunEvent | None) -> None:
        if isinstance(seen, ScriptEnded):
            self.script_ended = seen
        elif isinstance(seen, ExitReported):
            # The guest reports it twice, at its endpoint and on its console, in either order.
            if self.reported_exit is None or seen.exit.channel is ExitChannel.ENDPOINT:
                self.reported_exit = seen.exit
            self.undelivered = self.undelivered or seen.undelivered
        elif isinstance(seen, ConsoleLineMatched) and seen.rule == "exit":
            self.exit_line = seen

    def is_over(self, rule: str) -> bool:
        """Whether only outputs remain to be waited for. rule: the job's ``exit``."""
        if self.shutdown_cause is not None or self.exit_line is not None:
            return True
        # If a console line decides, a status that the guest reports does not.
        is_reported = self.reported_exit is not None or self.script_ended is not None
        return is_reported and not rule.startswith(CONSOLE_RULE)


@dataclass
class RunControl:
    """How a run may be controlled now. Only :mod:`vmjobs.agent.run.monitor` writes it.

    checkpointable: the VM may be saved. suspendable: the job itself runs, so its VM may be suspended.
    stop_by: monotonic time at which a job that got the stop signal ``stopped_by`` is ended.
    """

    checkpointable: bool = False
    suspendable: bool = False
    stop_by: float = math.inf
    stopped_by: int = 0


@dataclass
class RunClock:
    """Boot and run time of a job in monotonic seconds, without the time of suspensions.

    ran_before: seconds that the job ran before its VM was saved. boot_begun: start of the boot.
    """

    ran_before: float = 0.0
    boot_begun: float = 0.0
    _run_begun: float = math.inf
    _suspended_seconds: float = 0.0
    _suspended_since: float = math.inf

    def begin_boot(self) -> None:
        self.boot_begun = time.monotonic()

    def begin_run(self) -> None:
        self._run_begun = time.monotonic()

    @property
    def is_running(self) -> bool:
        """Whether the job itself has begun to run here."""
        return self._run_begun < math.inf

    def suspend(self) -> None:
        self._suspended_since = time.monotonic()

    def resume(self) -> None:
        # For a moment both fields count.
        self._suspended_seconds += time.monotonic() - self._suspended_since
        self._suspended_since = math.inf

    def ran(self) -> float:
        """Return the job's run time in seconds, since its first start and without suspensions."""
        seen = time.monotonic()
        suspended_seconds = self._suspended_seconds + max(0.0, seen - self._suspended_since)
        return self.ran_before + max(0.0, seen - self._run_begun - suspended_seconds)
