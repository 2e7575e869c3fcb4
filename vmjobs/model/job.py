"""A job: its reports, its history, and what clients see. :func:`advance` alone changes its state."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field, StringConstraints, model_validator

from vmjobs.errors import Conflict
from vmjobs.model.base import FrozenModel, LenientModel
from vmjobs.model.checkpoint import Checkpoint
from vmjobs.model.fields import Digest, RelativePath
from vmjobs.model.hypervisors import HypervisorKind
from vmjobs.model.spec import JobSpec
from vmjobs.states import TRANSITIONS, Actor, JobState, ReasonCode, actor_for


class StreamName(StrEnum):
    """The byte streams that a job writes."""

    OUT = "out"
    ERR = "err"
    CONSOLE = "console"


class ExitChannel(StrEnum):
    """How the guest reported its exit status (guest contract, "How a job ends")."""

    ENDPOINT = "endpoint"
    OUTPUT_DISK = "output-disk"
    CONSOLE = "console"
    POWEROFF = "poweroff"


class JobAction(StrEnum):
    """An action on a set of jobs."""

    CANCEL = "cancel"
    HOLD = "hold"
    RELEASE = "release"


class ExitStatus(FrozenModel):
    """How the script ended: either ``code`` or ``signal``. channel: of the report."""

    code: int | None = Field(default=None, ge=0, le=255)
    signal: int | None = Field(default=None, ge=1, le=64)
    channel: ExitChannel

    @model_validator(mode="after")
    def _check_one_of(self) -> ExitStatus:
        if (self.code is None) == (self.signal is None):
            raise ValueError("exactly one of code and signal")
        return self

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def shell_code(self) -> int:
        """The status a POSIX shell would show: the code, or 128 plus the signal."""
        return self.code if self.code is not None else 128 + (self.signal or 0)


class Reason(FrozenModel):
    """A reason: a stable code, a sentence, and who must act."""

    code: ReasonCode
    message: str = Field(default="", max_length=8192)
    actor: Actor = Actor.USER


def reason(code: ReasonCode, message: str = "") -> Reason:
    """A reason with the actor for its code."""
    return Reason(code=code, message=message[:8192], actor=actor_for(code))


class RejectedEntry(FrozenModel):
    """An output of the guest that was refused."""

    path: str = Field(max_length=4096)
    why: str = Field(max_length=512)


#: Byte counters of a job, in the order of its steps. ``image``: bytes of its image fetched for the job,
#: 0 if the node had all; ``input``: bytes of its inputs; ``memory``: peak memory of its VM on the node;
#: ``disk``: disk space on the node that holds the VM's writes; ``console``, ``log``: bytes written
#: there (log: standard output and error); ``output``: bytes of delivered files; ``checkpoint``: bytes
#: sent and fetched to save and resume its VM.
BYTE_COUNTERS: Final = ("image", "input", "memory", "disk", "console", "log", "output", "checkpoint")
ByteCounterName = Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,32}$")]
#: Below the limit up to which every JSON reader keeps integers exact.
ByteCount = Annotated[int, Field(ge=0, lt=2**53)]
ByteCounters = Annotated[dict[ByteCounterName, ByteCount], Field(max_length=32)]
ProcessorSeconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Report(FrozenModel):
    """An agent's report about an attempt: one event, and the facts known by then.

    seconds: durations of finished phases, by name (staging, booting, running, collecting).
    bytes: byte counters so far, by name (:data:`BYTE_COUNTERS`).
    cpu_seconds: processor time of the node that the VM and its network have used so far.
    """

    state: JobState
    reason: Reason
    time: datetime
    hypervisor: HypervisorKind | None = None
    exit: ExitStatus | None = None
    seconds: dict[str, float] = Field(default_factory=dict)
    bytes: ByteCounters = Field(default_factory=dict)
    cpu_seconds: ProcessorSeconds = 0.0
    rejected: tuple[RejectedEntry, ...] = Field(default=(), max_length=1000)


AttemptId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class AttemptClaim(FrozenModel):
    """An agent's claim to run a job now. A newer claim fences off older ones."""

    attempt: AttemptId
    node: str = Field(min_length=1, max_length=255)


class JobTicket(LenientModel):
    """The answer to a claim: the spec, and the checkpoint to resume from, if any.

    tries_left: number of further attempts if this one fails for a :data:`RETRYABLE` reason.
    """

    job_id: str
    attempt: str
    index: int = Field(ge=0, description="place in its array, from 0")
    count: int = Field(ge=1)
    image_digest: Digest
    spec: JobSpec
    checkpoint: Checkpoint | None = None
    tries_left: int = Field(default=0, ge=0)


class Output(LenientModel):
    """An output file of a job."""

    path: RelativePath
    size: int = Field(ge=0)
    digest: Digest


class JobEvent(LenientModel):
    """One event of a job's history. ``seq`` counts from 1 within the job."""

    seq: int = Field(ge=1)
    time: datetime
    state: JobState
    reason: Reason
    attempt: str = ""


class CondorRef(LenientModel):
    """A job's identity in HTCondor: schedd name and ``cluster.proc``."""

    schedd: str
    cluster: int
    proc: int
    grid_job_id: str = ""


class Job(LenientModel):
    """A job as clients see it."""

    id: str
    array: str = Field(description="id of the submission this job belongs to")
    index: int
    count: int
    owner: str
    spec: JobSpec
    image_digest: Digest
    state: JobState
    reason: Reason
    created: datetime
    updated: datetime
    attempts: int = 0
    node: str = ""
    hypervisor: HypervisorKind | None = None
    exit: ExitStatus | None = None
    seconds: dict[str, float] = Field(default_factory=dict)
    bytes: dict[str, int] = Field(default_factory=dict)
    cpu_seconds: float = 0.0
    outputs: tuple[Output, ...] = ()
    rejected: tuple[RejectedEntry, ...] = ()
    condor: CondorRef | None = None


def advance(old: JobState, new: JobState, *, job_id: str = "") -> JobState:
    """Check one transition of a job; returns the new state.

    Raises:
        Conflict: the table does not allow it.
    """
    if new not in TRANSITIONS[old]:
        raise Conflict(f"job {job_id} is {old} and cannot become {new}")
    return new
