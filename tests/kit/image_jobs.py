"""A node that runs jobs with an image of their own, through the agent's own steps, on real VMs."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from images.cloudinit import write_seed
from tests.kit.agent_runs import SETTINGS, Images, Lease, executed, job_that
from tests.kit.hypervisors import chooser
from vmjobs.agent.journal import Journal
from vmjobs.agent.run.outcome import RunOutcome
from vmjobs.agent.run.services import RunServices, RunSettings
from vmjobs.agent.run.state import Run, RunRequest
from vmjobs.agent.vm.events import EventQueue
from vmjobs.errors import Unavailable
from vmjobs.hypervisor.base import BootImage, Hypervisor
from vmjobs.local import LocalJob
from vmjobs.model import (
    AttemptClaim,
    HypervisorKind,
    JobState,
    JobTicket,
    Output,
    Report,
    StreamName,
)


@dataclass
class Outcome:
    outcome: RunOutcome
    reports: list[Report]
    console: bytes
    out: bytes
    outputs: Path

    @property
    def states(self) -> list[JobState]:
        return [report.state for report in self.reports]


class Job(LocalJob):
    """A job that may be run again."""

    tries_left = 0
    refuses: Exception | None = None
    hears_of_nothing_printed = False

    def append(self, stream: StreamName, offset: int, data: bytes) -> None:
        if self.hears_of_nothing_printed:
            raise Unavailable("api", "it is down")
        super().append(stream, offset, data)

    def claim(self, claim: AttemptClaim) -> JobTicket:
        return super().claim(claim).model_copy(update={"tries_left": self.tries_left})

    def put_output(self, path: str, source: BinaryIO, size: int) -> Output:
        if self.refuses is not None:
            raise self.refuses
        return super().put_output(path, source, size)


@dataclass
class Node:
    """Runs jobs, one at a time. tries_left: of each. refuses: error of each output's upload."""

    folder: Path
    image: BootImage
    drivers: dict[HypervisorKind, Hypervisor]
    tries_left: int = 0
    refuses: Exception | None = None
    settings: RunSettings = SETTINGS

    def start(self, do: str = "", **fields: object) -> tuple[Run, Job, Lease]:
        sinks = {name: io.BytesIO() for name in StreamName}
        job = job_that(do, self.folder, Job, "sha256:" + "0" * 64, sinks, **fields)
        job.tries_left, job.refuses = self.tries_left, self.refuses
        journal = Journal(self.folder / "runs")
        services = RunServices(
            Images(self.image), chooser(self.drivers), journal, self.settings, write_seed
        )
        lease = Lease()
        return (
            Run(RunRequest(job, lease.progress, services, job.job_id, uuid.uuid4().hex, EventQueue())),
            job,
            lease,
        )

    def run(
        self, do: str = "", meddle: Callable[[Run, Lease], None] | None = None, **fields: object
    ) -> Outcome:
        """Run a job to its end. meddle: acts on the run meanwhile."""
        this_run, job, lease = self.start(do, **fields)
        outcome = executed(this_run, lease, meddle)
        for driver in self.drivers.values():
            assert this_run.choice.vm_name not in driver.list()
        assert list((self.folder / "runs").iterdir()) == []
        console, out = (_text(job, name) for name in (StreamName.CONSOLE, StreamName.OUT))
        return Outcome(outcome, lease.reports, console, out, job.output_directory)


def _text(job: LocalJob, name: StreamName) -> bytes:
    sink = job.sinks[name]
    assert isinstance(sink, io.BytesIO)
    return sink.getvalue()
