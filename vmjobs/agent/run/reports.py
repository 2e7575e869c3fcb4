"""Builds the reports of a run, with its measured times and resources, and passes them on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vmjobs.agent.run.outcome import RunOutcome
from vmjobs.agent.run.report_uploader import ReportUploader
from vmjobs.agent.run.resource_usage import ResourceUsage
from vmjobs.model import HypervisorKind, JobState, ReasonCode, RejectedEntry, Report, now, reason


@dataclass
class RunReports:
    """The reports of one run.

    on_report: receives each report of a new state, for the client that started the run. on_usage:
        likewise the resource usage from time to time, between states. Both must neither block for
        long nor raise.
    rejected: rejected outputs; they may become more. measure: brings ``usage`` up to date.
    hypervisor: one that is known to boot the image; None until then. seconds: time spent in each phase.
    """

    on_report: Callable[[Report], object]
    uploader: ReportUploader
    rejected: Sequence[RejectedEntry]
    usage: ResourceUsage
    measure: Callable[[], None]
    on_usage: Callable[[Report], object] | None = None
    hypervisor: HypervisorKind | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    #: The progress that was reported last; None: none yet, or the run has ended.
    _last_progress: RunOutcome | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_seconds(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = round(self.seconds.get(phase, 0.0) + seconds, 3)

    def make(self, outcome: RunOutcome) -> Report:
        return Report(
            state=outcome.state,
            reason=outcome.reason,
            time=now(),
            hypervisor=self.hypervisor,
            exit=outcome.exit,
            seconds=dict(self.seconds),
            bytes=dict(self.usage.bytes),
            cpu_seconds=round(self.usage.cpu_seconds, 2),
            rejected=tuple(self.rejected),
        )

    def progress(self, state: JobState, message: str) -> None:
        """Report a new state to the client and to the repository."""
        self.measure()
        with self._lock:
            self._last_progress = RunOutcome(state, reason(ReasonCode.PROGRESS, message))
            report = self.make(self._last_progress)
            self.uploader.report(report)
            self.on_report(report)

    def report_usage(self) -> None:
        """Measure the usage and pass it to ``on_usage``.

        The repository gets it with the next state, because each report is a write there.
        """
        self.measure()
        with self._lock:
            if self._last_progress is not None and self.on_usage is not None:
                self.on_usage(self.make(self._last_progress))

    def end(self, outcome: RunOutcome) -> None:
        """Report the outcome to the client; nothing is reported after it."""
        with self._lock:
            self._last_progress = None
            self.on_report(self.make(outcome))
