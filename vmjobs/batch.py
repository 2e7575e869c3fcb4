"""Jobs as a batch system has them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vmjobs.model import CondorRef, HypervisorKind, JobSpec


class BatchStatus(StrEnum):
    """HTCondor's JobStatus, and MISSING for a job that the schedd does not know."""

    IDLE = "idle"
    RUNNING = "running"
    REMOVED = "removed"
    COMPLETED = "completed"
    HELD = "held"
    SUSPENDED = "suspended"
    MISSING = "missing"


@dataclass(frozen=True)
class BatchJob:
    """A job to submit to a scheduler.

    token: valid for this job only; "": not made yet.
    kinds: hypervisors that can boot its image and that its specification allows; empty: unknown.
    architecture: of its image, as ``uname -m`` names it; "": unknown.
    cloud_init: its guest looks for NoCloud data.
    """

    id: str
    array: str
    index: int
    owner: str
    spec: JobSpec
    token: str = ""
    kinds: tuple[HypervisorKind, ...] = ()
    architecture: str = ""
    cloud_init: bool = False


@dataclass(frozen=True)
class Observation:
    """A job's state at its scheduler.

    exit_code, exit_signal: of the process that the scheduler ran (``vmjobs exec``), once completed.
    """

    job_id: str
    status: BatchStatus
    ref: CondorRef
    reason: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None
