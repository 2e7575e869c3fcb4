"""What a run is made with where there is one image, and nobody but the test to hear of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from vmjobs.hypervisor.base import BootImage
from vmjobs.model import JobState, Report
from vmjobs.ports import Progress


class Lease:
    """Hears how the job goes on."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def progress(self, report: Report) -> None:
        self.reports.append(report)

    def reached(self, state: JobState) -> bool:
        return any(report.state is state for report in self.reports)


@dataclass
class Images:
    """One image."""

    image: BootImage

    def prepare(self, digest: str, progress: Progress | None = None) -> BootImage:
        return self.image

    def lease(self, digest: str, progress: Progress | None = None) -> AbstractContextManager[BootImage]:
        return nullcontext(self.image)

    def fetched(self, digest: str) -> int:
        return 0

    def cached(self) -> list[str]:
        return []
