"""The job: one frozen specification, one set of states, one transition table.

This module does no I/O. :func:`advance` alone changes a job's state; it checks the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from vmjobs.errors import Conflict, Fault, InvalidSpec
from vmjobs.paths import check_path
from vmjobs.states import (  # noqa: F401 - they are a part of this model, and imported from here
    MAX_ATTEMPTS,
    ON_NODE_STATES,
    REQUEUE_REASONS,
    RETRYABLE,
    TRANSITIONS,
    Actor,
    JobState,
    ReasonCode,
    actor_for,
)

MIB: Final = 1024 * 1024
MAX_SCRIPT_BYTES: Final = 256 * 1024
MAX_ARRAY: Final = 1000


#: The context in which clients validate replies.
REPLY: Final = "reply"


class LenientModel(BaseModel):
    """A value object, immutable; ignores unknown fields, because a later release may send it."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class FrozenModel(LenientModel):
    """A value object that is strict about unknown fields, except in a reply."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _ignore_unknown(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context != REPLY or not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name in cls.model_fields}


# --------------------------------------------------------------------------- enumerations


class Strategy(StrEnum):
    """How a job uses a virtual machine."""

    SCRIPT = "script"
    IMAGE = "image"


class BootMethod(StrEnum):
    """How a VM boots: a kernel stored beside the disk, or a boot loader on the disk."""

    KERNEL = "kernel"
    BIOS = "bios"
    UEFI = "uefi"


class HypervisorKind(StrEnum):
    """The hypervisor of a VM, best first for the node's own architecture."""

    KVM = "kvm"
    UML = "uml"
    QEMU = "qemu"


class NetworkMode(StrEnum):
    """What a guest can reach: nothing, its guest endpoint, or also the internet."""

    NONE = "none"
    REPOSITORY = "repository"
    OUTBOUND = "outbound"


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


# --------------------------------------------------------------------------- small types


def _check_relative(value: str) -> str:
    if why := check_path(value):
        raise ValueError(f"{why}: it must be a plain path inside the job's directory")
    return value


#: Names of environment variables.
VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def _check_environment(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not VARIABLE_NAME.fullmatch(name):
            # Text after a '=' is probably a value, which may be secret: the message leaves it out.
            said = name.partition("=")[0]
            raise ValueError(f"{said!r} is not a variable name (letters, digits and '_')")
        if "\0" in text:
            raise ValueError(f"the value of {name} has a NUL byte")
    return value


def _check_script(value: str) -> str:
    if value and not value.strip():
        raise ValueError("the script is empty")
    if "\0" in value:
        raise ValueError("the script has a NUL byte: it must be text")
    size = len(value.encode())
    if size > MAX_SCRIPT_BYTES:
        raise ValueError(f"the script has {size} bytes, the limit is {MAX_SCRIPT_BYTES}")
    return value


def _reject_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not have a NUL byte")
    return value


RelativePath = Annotated[str, StringConstraints(max_length=255), AfterValidator(_check_relative)]


def _reject_short_digest(value: str) -> str:
    if value.startswith("sha256:") and len(value) != len("sha256:") + 64:
        raise ValueError("a digest is 'sha256:' and 64 hexadecimal digits")
    return value


Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
#: The digest of a disk's or kernel's content: see ``images.content``.
ContentDigest = Annotated[str, StringConstraints(pattern=r"^tree:[0-9a-f]{64}$")]
#: The owner part of an image's name; ``library`` is the service's own.
Namespace = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
ImageName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Tag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$")]
#: ``sha256:…``, or ``name``, ``name:tag``, ``namespace/name``, ``namespace/name:tag``.
ImageRef = Annotated[
    str,
    StringConstraints(
        pattern=r"^(sha256:[0-9a-f]{64}|([a-z0-9][a-z0-9._-]{0,63}/)?"
        r"[a-z0-9][a-z0-9._-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9._-]{0,63})?)$"
    ),
    AfterValidator(_reject_short_digest),
]
Label = Annotated[str, StringConstraints(max_length=63, pattern=r"^[A-Za-z0-9._/-]+$")]
Argument = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_reject_nul)]
Environment = Annotated[dict[str, str], AfterValidator(_check_environment)]


@dataclass(frozen=True)
class Capabilities:
    """What the VMs of a hypervisor support.

    can_save: they can be saved, and resumed on another node. boots_image_kernel: they boot the
    image's own kernel. cloud_init: their kernel reads the disk of NoCloud data. cpus: maximum number
    of processors. shared_cpus: the same for VMs with several users, as cluster VMs have.
    """

    can_save: bool = True
    boots_image_kernel: bool = True
    cloud_init: bool = True
    cpus: int = 256
    shared_cpus: int = 256


#: A UML VM boots UML's own kernel, and has several processors only if it need not isolate its users
#: from each other (``uml_boot.system_call_parameters``). A UML kernel may support less.
CAPABILITIES: Final[Mapping[HypervisorKind, Capabilities]] = MappingProxyType(
    {
        HypervisorKind.KVM: Capabilities(),
        HypervisorKind.UML: Capabilities(
            can_save=False, boots_image_kernel=False, cpus=64, shared_cpus=1
        ),
        HypervisorKind.QEMU: Capabilities(),
    }
)
#: Hypervisors whose VMs can be saved, and resumed on another node.
CHECKPOINTABLE_KINDS: Final = tuple(kind for kind, can in CAPABILITIES.items() if can.can_save)
#: Prefix of a rule about the console; a regular expression follows.
CONSOLE_RULE: Final = "console:"
MAX_PATTERN: Final = 512
REPORT: Final = "report"
POWEROFF: Final = "poweroff"
STARTED: Final = "started"


def check_checkpoint(kind: HypervisorKind | None) -> str:
    """Why a job that demands this hypervisor cannot be checkpointed, or ``""``."""
    if kind in {None, *CHECKPOINTABLE_KINDS}:
        return ""
    return f"checkpoint is for {' and '.join(CHECKPOINTABLE_KINDS)}: {kind} VMs cannot be saved"


def cpu_limit(kind: HypervisorKind, *, shared: bool = False) -> int:
    """Maximum number of processors of a VM. shared: several users share it."""
    return CAPABILITIES[kind].shared_cpus if shared else CAPABILITIES[kind].cpus


def kinds_with_cpus(cpus: int, *, shared: bool = False) -> tuple[HypervisorKind, ...]:
    """The hypervisors whose VMs can have so many processors, best first."""
    return tuple(kind for kind in HypervisorKind if cpu_limit(kind, shared=shared) >= cpus)


def check_cpus(kind: HypervisorKind | None, cpus: int, *, shared: bool = False) -> str:
    """Why a VM of the requested hypervisor cannot have so many processors, or ``""``."""
    if kind is None or (most := cpu_limit(kind, shared=shared)) >= cpus:
        return ""
    able = " or ".join(kinds_with_cpus(cpus, shared=shared)) or "none"
    return (
        f"a {kind} VM has at most {most} processor{'s' * (most > 1)}, but {cpus} are requested: "
        f"request fewer, or another hypervisor ({able})"
    )


def check_image_cpus(cpus: int, kinds: Sequence[HypervisorKind], *, shared: bool = False) -> str:
    """Why no hypervisor for an image supports so many processors, or ``""``."""
    most = max(cpu_limit(kind, shared=shared) for kind in kinds)
    if most >= cpus:
        return ""
    return (
        f"only {' or '.join(kinds)} boots the image, with at most {most} processor{'s' * (most > 1)}, "
        f"but {cpus} are requested"
    )


def _check_rule(value: str, *words: str) -> str:
    if value in words:
        return value
    pattern = value.removeprefix(CONSOLE_RULE)
    if pattern == value or not pattern or len(pattern) > MAX_PATTERN:
        raise ValueError(f"must be {', '.join(words)} or {CONSOLE_RULE}REGEX")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return value


def _check_exit_rule(value: str) -> str:
    return _check_rule(value, REPORT, POWEROFF)


def _check_ready_rule(value: str) -> str:
    return _check_rule(value, REPORT, STARTED)


class InputFile(FrozenModel):
    """An input file: its name in the job's directory, and the blob with its bytes."""

    name: RelativePath
    digest: Digest
    size: int = Field(ge=0, description="bytes")


class JobSpec(FrozenModel):
    """A user's job specification. Submission resolves a tag in ``image`` to a digest.

    exit: how the job ends. ``report``: the guest reports an exit status, by any channel of the guest
        contract; ``poweroff``: the guest powers off, which is a success unless it reported another
        status; ``console:REGEX``: a console line matches the expression, which is a success and
        stops the VM.
    ready: what ends BOOTING. ``report``: a report of the guest; ``started``: the start of the VM;
        ``console:REGEX``: a matching console line. Unset: ``report`` if ``exit`` is ``report``, else
        ``started``.
    user_data: cloud-init user data, for images with cloud-init; unset: data that runs ``script``.
    """

    strategy: Strategy = Strategy.SCRIPT
    name: str = Field(default="", max_length=128)
    image: ImageRef
    script: Annotated[str, AfterValidator(_check_script)] = Field(default="", validate_default=True)
    exit: Annotated[str, AfterValidator(_check_exit_rule)] = REPORT
    ready: Annotated[str, AfterValidator(_check_ready_rule)] | None = None
    user_data: Annotated[str, StringConstraints(max_length=64 * 1024), AfterValidator(_reject_nul)] = ""
    arguments: tuple[Argument, ...] = Field(default=(), max_length=256)
    environment: Environment = Field(default_factory=dict)
    inputs: tuple[InputFile, ...] = Field(default=(), max_length=1000)
    outputs: tuple[RelativePath, ...] = Field(default=(), max_length=100, description="globs")
    cpus: int = Field(default=1, ge=1, le=256, strict=True)
    memory: int = Field(default=512, ge=32, le=4 * MIB, strict=True, description="MiB")
    disk: int = Field(default=1024, ge=1, le=64 * MIB, strict=True, description="MiB, outputs included")
    hypervisor: HypervisorKind | None = None
    network: NetworkMode = NetworkMode.REPOSITORY
    boot_seconds: int = Field(default=180, ge=1, le=3600, strict=True)
    run_seconds: int = Field(default=3600, ge=1, le=30 * 86400, strict=True)
    route: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    accounting_group: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    labels: dict[Label, Label] = Field(default_factory=dict, max_length=32)
    checkpoint: bool = Field(
        default=False,
        strict=True,
        description="save the VM when the job is vacated; resume it on another node",
    )

    @model_validator(mode="after")
    def _check_input_names(self) -> JobSpec:
        names = [f.name for f in self.inputs]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"inputs: duplicate names: {', '.join(twice)}")
        return self

    @field_validator("script")
    @classmethod
    def _require_script(cls, value: str, info: ValidationInfo) -> str:
        # A field validator, so that this fault is listed together with those of other fields.
        if not value and info.data.get("strategy") is Strategy.SCRIPT:
            raise ValueError("a job of the strategy 'script' needs a script")
        return value

    @model_validator(mode="after")
    def _check_strategy(self) -> JobSpec:
        if self.strategy is not Strategy.SCRIPT:
            return self
        if self.exit != REPORT or self.ready not in {None, REPORT} or self.user_data:
            raise ValueError("exit, ready and user_data are for the strategy 'image' only")
        return self

    @model_validator(mode="after")
    def _check_checkpointable(self) -> JobSpec:
        if not self.checkpoint:
            return self
        if self.strategy is not Strategy.SCRIPT:
            raise ValueError("checkpoint is for the strategy 'script' only")
        if why := check_checkpoint(self.hypervisor):
            raise ValueError(why)
        return self

    @property
    def kinds(self) -> tuple[HypervisorKind, ...]:
        """The hypervisors that the specification allows."""
        able = (
            k for k in kinds_with_cpus(self.cpus) if CAPABILITIES[k].can_save or not self.checkpoint
        )
        return tuple(kind for kind in able if self.hypervisor in {None, kind})

    @property
    def ready_rule(self) -> str:
        """The effective rule for ``ready``."""
        return self.ready or (REPORT if self.exit == REPORT else STARTED)


class Submission(FrozenModel):
    """The body of ``POST /v1/jobs``: one spec, run ``count`` times as an array."""

    spec: JobSpec
    count: int = Field(default=1, ge=1, le=MAX_ARRAY, strict=True)


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
        """True for exit code 0."""
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


class SavedFile(FrozenModel):
    """A file of a saved VM. digest: of its content (``images.content``); None if empty."""

    name: RelativePath
    size: int = Field(ge=0, description="bytes")
    digest: ContentDigest | None = None

    @model_validator(mode="after")
    def _check_digest(self) -> SavedFile:
        if (self.size == 0) != (self.digest is None):
            raise ValueError("a file must have a digest if and only if it is not empty")
        return self


class VmSpec(FrozenModel):
    """The VM of a transparent job, which must be the same where the job resumes.

    named: its image, as the job names it; image: the digest. door: the secret that authenticates the
    host to the guest (``vmjobs.agent.condor_job.job_access``). memory, disk: MiB.
    """

    named: ImageRef
    image: Digest
    door: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32})?$")]
    cpus: int = Field(ge=1)
    memory: int = Field(ge=1)
    disk: int = Field(ge=1)
    network: NetworkMode


class Checkpoint(FrozenModel):
    """A job's saved VM, with all that is needed to resume it.

    machine: its name, which it keeps. platform: the driver's name for platforms that can resume it.
    sentinel: marks its guest's lines on the console. guest: SHA-256 of the guest's token. ran: seconds
    that the job has run. heard: bytes of its console that have been parsed. files: of the run's
    directory. making: the VM of a transparent job.
    """

    machine: Annotated[str, StringConstraints(pattern=r"^vmjobs-[A-Za-z0-9._-]{1,100}$")]
    hypervisor: HypervisorKind
    platform: str = Field(max_length=512)
    sentinel: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    guest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    ran: float = Field(ge=0, allow_inf_nan=False)
    heard: int = Field(default=0, ge=0)
    files: tuple[SavedFile, ...] = Field(max_length=32)
    making: VmSpec | None = None


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


class HypervisorInfo(FrozenModel):
    """A node's probe result for one hypervisor. ``works``: a kernel booted."""

    kind: HypervisorKind
    works: bool
    detail: str = Field(default="", max_length=4096)
    seconds: float = Field(default=0.0, ge=0)
    version: str = Field(default="", max_length=256)
    cpus: int = Field(default=1, ge=1, description="maximum for the VM of a job")
    cloud_init: bool = Field(default=True, description="its kernel reads the disk of NoCloud data")


NodeName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")]


class Node(LenientModel):
    """An execute node as it registers: its resources, cached images and running jobs.

    image_names: names by which jobs referred to cached images. fault: why it accepts no jobs now; "":
    it accepts jobs. networks: network modes of its VMs.
    """

    name: NodeName
    site: str = Field(default="", max_length=255, description="the pool that the node belongs to")
    version: str = Field(default="", max_length=64, description="of vmjobs on the node")
    cpus: int = Field(ge=1)
    memory: int = Field(ge=1, description="MiB")
    disk: int = Field(ge=0, description="MiB free for jobs")
    hypervisors: tuple[HypervisorInfo, ...] = Field(default=(), max_length=16)
    images: tuple[Digest, ...] = Field(default=(), max_length=10000)
    image_names: tuple[ImageRef, ...] = Field(default=(), max_length=1000)
    running: tuple[str, ...] = Field(default=(), max_length=10000, description="job ids")
    lent: int = Field(default=0, ge=0, description="MiB of memory in use by VMs of jobs")
    cluster_cpus: int = Field(default=0, ge=0, description="for cluster VMs")
    cluster_memory: int = Field(default=0, ge=0, description="MiB, for cluster VMs")
    cluster_disk: int = Field(default=0, ge=0, description="MiB, for cluster VMs")
    fault: str = Field(default="", max_length=1024)
    networks: tuple[NetworkMode, ...] = Field(default=tuple(NetworkMode), max_length=16)
    updated: datetime


# --------------------------------------------------------------------------- functions


def now() -> datetime:
    """The current time, in UTC."""
    return datetime.now(UTC)


def may_follow(old: JobState, new: JobState) -> bool:
    """Whether the table allows the transition from ``old`` to ``new``."""
    return new in TRANSITIONS[old]


def advance(old: JobState, new: JobState, *, job_id: str = "") -> JobState:
    """Check one transition of a job; returns the new state.

    Raises:
        Conflict: the table does not allow it.
    """
    if not may_follow(old, new):
        raise Conflict(f"job {job_id} is {old} and cannot become {new}")
    return new


#: Limit on listed faults. Megabytes of hostile JSON may have millions, of hundreds of bytes each.
MAX_FAULTS: Final = 1000


#: Replaces messages of pydantic that show a regular expression, or mention fields and inputs.
_MESSAGES: Final = {
    "string_pattern_mismatch": "has an invalid format",
    "missing": "is missing",
    "extra_forbidden": "is an unknown field",
}
_IMAGE_NAME_MESSAGE: Final = "must be like muons:2026 or mygroup/muons:2026, in lower case"
_SHOULD_PREFIX: Final = re.compile(r"^[A-Z][a-z]+ should ")


def faults_of(error: ValidationError, prefix: str = "") -> list[Fault]:
    """Convert pydantic's errors, one fault each; above MAX_FAULTS, only their number."""
    if (count := error.error_count()) > MAX_FAULTS:
        where = prefix.removesuffix(".")
        return [Fault(where, "too_many_faults", f"there are {count} faults, too many to list")]
    found = []
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in item["loc"])
        is_name = where == "image" and item["type"] == "string_pattern_mismatch"
        sentence = _IMAGE_NAME_MESSAGE if is_name else _sentence(item["type"], item["msg"])
        found.append(Fault(f"{prefix}{where}", item["type"], sentence))
    return found


def _sentence(kind: str, message: str) -> str:
    """Rephrase a message of pydantic without types and regular expressions."""
    if kind in _MESSAGES:
        return _MESSAGES[kind]
    return _SHOULD_PREFIX.sub("must ", message.removeprefix("Value error, "), count=1)


def parse_spec(data: Any) -> JobSpec:
    """Validate a spec from decoded JSON.

    Raises:
        InvalidSpec: with every fault, not only the first.
    """
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise InvalidSpec("the job specification has faults", faults=faults_of(error)) from error
