"""A run's parts for tests: one image, and a lease that keeps the reports for the test."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.kit.waiting import wait_until
from vmjobs.agent.image_source import LazyStart
from vmjobs.agent.run.job_run import execute
from vmjobs.agent.run.outcome import RunOutcome
from vmjobs.agent.run.services import RunSettings
from vmjobs.agent.run.state import Run
from vmjobs.file_transfer import ProgressCallback
from vmjobs.hypervisor.base import BootImage
from vmjobs.local import LocalJob, describe_inputs
from vmjobs.model import MIB, JobSpec, JobState, Report

SETTINGS = RunSettings("here", 16 * MIB, 16 * MIB, stop_seconds=5, grace_seconds=3)
_Job = TypeVar("_Job", bound=LocalJob)


class Lease:
    """Receives the reports of a job."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def progress(self, report: Report) -> None:
        self.reports.append(report)

    def reached(self, state: JobState) -> bool:
        return any(report.state is state for report in self.reports)

    def wait_for(self, state: JobState) -> None:
        wait_until(lambda: self.reached(state), 240, f"it is {state}")


@dataclass
class Images:
    """One image. held: number of current leases. stuck: a digest whose bytes do not arrive."""

    image: BootImage
    held: int = 0
    stuck: str = ""

    def prepare(self, digest: str, progress: ProgressCallback | None = None) -> BootImage:
        return self.image

    @contextmanager
    def lease(
        self, digest: str, progress: ProgressCallback | None = None, lazy: LazyStart | None = None
    ) -> Iterator[BootImage]:
        while digest == self.stuck and progress is not None:
            progress(0, 1)
            threading.Event().wait(0.05)
        self.held += 1
        yield self.image
        self.held -= 1

    def fetched(self, digest: str) -> int:
        return 0

    def cached(self) -> list[str]:
        return []


def job_that(
    do: str, folder: Path, kind: Callable[..., _Job], image: str, sinks: object = None, **fields: object
) -> _Job:
    """Make a job whose guest obeys an input file, in a new directory below ``folder``."""
    place = folder / uuid.uuid4().hex[:6]
    told = place / "inputs" / "do"
    told.parent.mkdir(parents=True)
    told.write_text(do)
    values = {"strategy": "image", "network": "none", "disk": 16, "memory": 96, "boot_seconds": 240}
    spec = {"image": image, "inputs": describe_inputs({"do": told}), **values, **fields}
    return kind(
        job_id=f"job-{place.name}",
        spec=JobSpec.model_validate(spec),
        image_digest=image,
        files={"do": told},
        output_directory=place / "outputs",
        on_report=lambda _report: None,
        sinks=sinks or {},
    )


def executed(run: Run, lease: Lease, meddle: Callable[[Run, Lease], None] | None = None) -> RunOutcome:
    """Run a job to its end. meddle: acts on it meanwhile; its failure fails the test."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meddle, run, lease) if meddle else None
        outcome = execute(run)
        if other:
            other.result()
    return outcome
