"""The job: one frozen specification, one set of states, one transition table.

Nothing here does I/O. A job is moved by :func:`advance` alone, which checks the table and
returns the event to store.
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
from vmjobs.paths import refusal
from vmjobs.states import (  # noqa: F401 - they are a part of this model, and imported from here
    GIVEN_BACK,
    MAX_TRIES,
    MENDED_ELSEWHERE,
    ON_NODE,
    TRANSITIONS,
    Actor,
    JobState,
    ReasonCode,
    actor_for,
)

MIB: Final = 1024 * 1024
MAX_SCRIPT_BYTES: Final = 256 * 1024
MAX_ARRAY: Final = 1000


class Frozen(BaseModel):
    """A value object: immutable, and strict about unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# --------------------------------------------------------------------------- enumerations


class Strategy(StrEnum):
    """How a job uses a virtual machine."""

    SCRIPT = "script"
    IMAGE = "image"


class BootMethod(StrEnum):
    """How a machine comes up: a kernel kept beside the disk, or what is on the disk itself."""

    KERNEL = "kernel"
    BIOS = "bios"
    UEFI = "uefi"


class HypervisorKind(StrEnum):
    """What runs the machine, best first for the node's own architecture."""

    KVM = "kvm"
    UML = "uml"
    QEMU = "qemu"


class NetworkMode(StrEnum):
    """What a guest can reach: nothing, its own job endpoint, or also the world."""

    NONE = "none"
    REPOSITORY = "repository"
    OUTBOUND = "outbound"


class StreamName(StrEnum):
    """The byte streams a job leaves behind."""

    OUT = "out"
    ERR = "err"
    CONSOLE = "console"


class ExitChannel(StrEnum):
    """Which way the guest's exit status came (guest contract, point 5)."""

    ENDPOINT = "endpoint"
    OUTPUT_DISK = "output-disk"
    CONSOLE = "console"
    POWEROFF = "poweroff"


class JobAction(StrEnum):
    """What may be done to a set of jobs."""

    CANCEL = "cancel"
    HOLD = "hold"
    RELEASE = "release"


# --------------------------------------------------------------------------- small types


def _safe_relative(value: str) -> str:
    if why := refusal(value):
        raise ValueError(f"{why}: it must be a plain path inside the job's directory")
    return value


_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def _environment(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not _ENV_NAME.fullmatch(name):
            # What stands behind a '=' was meant for a value, which nobody is to be told.
            said = name.partition("=")[0]
            raise ValueError(f"{said!r} is not a variable name (letters, digits and '_')")
        if "\0" in text:
            raise ValueError(f"the value of {name} has a NUL byte")
    return value


def _script(value: str) -> str:
    if value and not value.strip():
        raise ValueError("the script is empty")
    if "\0" in value:
        raise ValueError("the script has a NUL byte: it must be text")
    size = len(value.encode())
    if size > MAX_SCRIPT_BYTES:
        raise ValueError(f"the script has {size} bytes, the limit is {MAX_SCRIPT_BYTES}")
    return value


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not have a NUL byte")
    return value


RelativePath = Annotated[str, StringConstraints(max_length=255), AfterValidator(_safe_relative)]


def _not_half_a_digest(value: str) -> str:
    if value.startswith("sha256:") and len(value) != len("sha256:") + 64:
        raise ValueError("a digest is 'sha256:' and 64 hexadecimal digits")
    return value


Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
#: The digest of a disk's content, or a kernel's: see ``images.content``.
ContentDigest = Annotated[str, StringConstraints(pattern=r"^tree:[0-9a-f]{64}$")]
#: Whose an image's name is; ``library`` is the service's own.
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
    AfterValidator(_not_half_a_digest),
]
Label = Annotated[str, StringConstraints(max_length=63, pattern=r"^[A-Za-z0-9._/-]+$")]
Argument = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_no_nul)]
Environment = Annotated[dict[str, str], AfterValidator(_environment)]


@dataclass(frozen=True)
class Abilities:
    """What the machines of a hypervisor can have.

    saves: they can be saved, and resumed elsewhere. own_kernel: they boot the image's kernel.
    cloud_init: their kernel reads the disk of NoCloud data. cpus: processors that one has at most.
    shared_cpus: the same where several users share it, as they do those of virtual clusters.
    """

    saves: bool = True
    own_kernel: bool = True
    cloud_init: bool = True
    cpus: int = 256
    shared_cpus: int = 256


#: The one place that says what each can do. A UML machine has a kernel of its own, and several
#: processors where it need not keep its users apart (``vmjobs.hypervisor.uml_boot.catching``); a node
#: may have another kernel, with less.
ABILITIES: Final[Mapping[HypervisorKind, Abilities]] = MappingProxyType(
    {
        HypervisorKind.KVM: Abilities(),
        HypervisorKind.UML: Abilities(saves=False, own_kernel=False, cpus=64, shared_cpus=1),
        HypervisorKind.QEMU: Abilities(),
    }
)
#: Hypervisors whose machines can be saved, and resumed elsewhere.
SAVING: Final = tuple(kind for kind, can in ABILITIES.items() if can.saves)
#: A rule on the console begins with this; a regular expression follows.
CONSOLE_RULE: Final = "console:"
MAX_PATTERN: Final = 512
REPORT: Final = "report"
POWEROFF: Final = "poweroff"
STARTED: Final = "started"


def cannot_save(kind: HypervisorKind | None) -> str:
    """Why no machine of the hypervisor that a job demands can be saved, or ``""``."""
    if kind in {None, *SAVING}:
        return ""
    return f"checkpoint is for {' and '.join(SAVING)}: no machine of {kind} can be saved"


def most_cpus(kind: HypervisorKind, *, shared: bool = False) -> int:
    """Processors that a machine has at most. shared: one that several users share."""
    return ABILITIES[kind].shared_cpus if shared else ABILITIES[kind].cpus


def with_cpus(cpus: int, *, shared: bool = False) -> tuple[HypervisorKind, ...]:
    """The hypervisors whose machines have so many processors, best first."""
    return tuple(kind for kind in HypervisorKind if most_cpus(kind, shared=shared) >= cpus)


def cannot_have(kind: HypervisorKind | None, cpus: int, *, shared: bool = False) -> str:
    """Why a machine of the hypervisor that is asked for has not so many processors, or ``""``."""
    if kind is None or (most := most_cpus(kind, shared=shared)) >= cpus:
        return ""
    able = " or ".join(with_cpus(cpus, shared=shared)) or "none"
    return (
        f"a machine of {kind} has {most} processor{'s' * (most > 1)}, and {cpus} are asked for: "
        f"ask for fewer, or for another hypervisor ({able})"
    )


def too_many(cpus: int, kinds: Sequence[HypervisorKind], *, shared: bool = False) -> str:
    """Why nothing that boots an image makes a machine with so many processors, or ``""``."""
    most = max(most_cpus(kind, shared=shared) for kind in kinds)
    if most >= cpus:
        return ""
    return (
        f"only {' or '.join(kinds)} boots the image, with {most} processor{'s' * (most > 1)} at most, "
        f"and {cpus} are asked for"
    )


def _rule(value: str, *words: str) -> str:
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


def _exit_rule(value: str) -> str:
    return _rule(value, REPORT, POWEROFF)


def _ready_rule(value: str) -> str:
    return _rule(value, REPORT, STARTED)


class InputFile(Frozen):
    """A file put into the job's directory: its name there and the blob that holds it."""

    name: RelativePath
    digest: Digest
    size: int = Field(ge=0, description="bytes")


class JobSpec(Frozen):
    """What a user asks for. A tag in ``image`` is resolved to a digest at submission.

    exit: what says how the job ended. ``report``: the guest says it, by any channel of the guest
        contract; ``poweroff``: the guest powers off by itself, which is a success unless it did
        report a status; ``console:REGEX``: a line of the console that the expression is found in,
        which is a success, and the machine is stopped.
    ready: what ends BOOTING. ``report``: the guest says it; ``started``: nothing is waited for;
        ``console:REGEX``. Unset: ``report`` where ``exit`` is, else ``started``.
    user_data: cloud-init user data, for an image that wants it; unset: what runs ``script``.
    """

    strategy: Strategy = Strategy.SCRIPT
    name: str = Field(default="", max_length=128)
    image: ImageRef
    script: Annotated[str, AfterValidator(_script)] = Field(default="", validate_default=True)
    exit: Annotated[str, AfterValidator(_exit_rule)] = REPORT
    ready: Annotated[str, AfterValidator(_ready_rule)] | None = None
    user_data: Annotated[str, StringConstraints(max_length=64 * 1024), AfterValidator(_no_nul)] = ""
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
        description="save a machine that is vacated; go on elsewhere",
    )

    @model_validator(mode="after")
    def _names_differ(self) -> JobSpec:
        names = [f.name for f in self.inputs]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"inputs: the same name twice: {', '.join(twice)}")
        return self

    @field_validator("script")
    @classmethod
    def _has_script(cls, value: str, info: ValidationInfo) -> str:
        # Here and not below, so that it is told together with the faults of other fields.
        if not value and info.data.get("strategy") is Strategy.SCRIPT:
            raise ValueError("a job of the strategy 'script' needs a script")
        return value

    @model_validator(mode="after")
    def _fits_strategy(self) -> JobSpec:
        if self.strategy is not Strategy.SCRIPT:
            return self
        if self.exit != REPORT or self.ready not in {None, REPORT} or self.user_data:
            raise ValueError("exit, ready and user_data are for the strategy 'image' only")
        return self

    @model_validator(mode="after")
    def _can_be_saved(self) -> JobSpec:
        if not self.checkpoint:
            return self
        if self.strategy is not Strategy.SCRIPT:
            raise ValueError("checkpoint is for the strategy 'script' only")
        if why := cannot_save(self.hypervisor):
            raise ValueError(why)
        return self

    @property
    def kinds(self) -> tuple[HypervisorKind, ...]:
        """What may run the job, as far as it says so itself."""
        able = (k for k in with_cpus(self.cpus) if ABILITIES[k].saves or not self.checkpoint)
        return tuple(kind for kind in able if self.hypervisor in {None, kind})

    @property
    def readiness(self) -> str:
        """The rule in force for ``ready``."""
        return self.ready or (REPORT if self.exit == REPORT else STARTED)


class Submission(Frozen):
    """The body of ``POST /v1/jobs``: one spec, run ``count`` times as an array."""

    spec: JobSpec
    count: int = Field(default=1, ge=1, le=MAX_ARRAY, strict=True)


class ExitStatus(Frozen):
    """How the script ended: exactly one of ``code`` and ``signal``, and who told."""

    code: int | None = Field(default=None, ge=0, le=255)
    signal: int | None = Field(default=None, ge=1, le=64)
    channel: ExitChannel

    @model_validator(mode="after")
    def _one_of(self) -> ExitStatus:
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


class Reason(Frozen):
    """Why: a stable code, a sentence, and who can mend it."""

    code: ReasonCode
    message: str = Field(default="", max_length=8192)
    actor: Actor = Actor.USER


def reason(code: ReasonCode, message: str = "") -> Reason:
    """A reason with the actor that belongs to its code."""
    return Reason(code=code, message=message[:8192], actor=actor_for(code))


class RejectedEntry(Frozen):
    """Something a guest offered as output that was not taken."""

    path: str = Field(max_length=4096)
    why: str = Field(max_length=512)


#: What of a job is counted in bytes, in the order of its steps. ``image``: of its image, fetched while
#: the job needed them, 0 where all was there; ``input``: of its inputs; ``memory``: of its node's, that
#: its machine had at most; ``disk``: of its node's, that hold what its machine wrote; ``console``,
#: ``log``: that it said there (log: standard output and error); ``output``: of files it delivered;
#: ``checkpoint``: sent and fetched of its machine, where it was saved or resumed.
AMOUNTS: Final = ("image", "input", "memory", "disk", "console", "log", "output", "checkpoint")

AmountName = Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,32}$")]
#: Below what every JSON reader takes for a whole number.
Amount = Annotated[int, Field(ge=0, lt=2**53)]
Amounts = Annotated[dict[AmountName, Amount], Field(max_length=32)]
ProcessorSeconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Report(Frozen):
    """What an agent tells about its attempt at a job: one event, and facts known by then.

    seconds: finished phases so far, by name (staging, booting, running, collecting).
    bytes: what was counted so far, by name (:data:`AMOUNTS`).
    cpu_seconds: of its node's processors that the machine has used so far, with its network.
    """

    state: JobState
    reason: Reason
    time: datetime
    hypervisor: HypervisorKind | None = None
    exit: ExitStatus | None = None
    seconds: dict[str, float] = Field(default_factory=dict)
    bytes: Amounts = Field(default_factory=dict)
    cpu_seconds: ProcessorSeconds = 0.0
    rejected: tuple[RejectedEntry, ...] = Field(default=(), max_length=1000)


AttemptId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class AttemptClaim(Frozen):
    """An agent says that it will run a job now. A newer claim fences off an older one."""

    attempt: AttemptId
    node: str = Field(min_length=1, max_length=255)


class SavedFile(Frozen):
    """A file of a saved machine. digest: of its content (``images.content``); of an empty one there is
    none.
    """

    name: RelativePath
    size: int = Field(ge=0, description="bytes")
    digest: ContentDigest | None = None

    @model_validator(mode="after")
    def _has_content(self) -> SavedFile:
        if (self.size == 0) != (self.digest is None):
            raise ValueError("a file has a digest if and only if it is not empty")
        return self


class Making(Frozen):
    """What a machine was made of whose job HTCondor alone knows: that is the same where it goes on.

    named: its image, as the job names it; image: the digest. door: the secret by which its guest knows
    its host (``vmjobs.agent.entrance``). memory, disk: MiB.
    """

    named: ImageRef
    image: Digest
    door: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32})?$")]
    cpus: int = Field(ge=1)
    memory: int = Field(ge=1)
    disk: int = Field(ge=1)
    network: NetworkMode


class Checkpoint(Frozen):
    """A job's machine as it was saved: what it takes to go on from there.

    machine: its name, which it keeps. platform: what can resume it, as the driver calls itself.
    sentinel: of its guest's lines on the console. guest: SHA-256 of the token that its guest knows.
    ran: seconds that the job has run of its time. heard: bytes of its console that have been read for
    what they say. files: of the run's directory. making: of an unchanged job of HTCondor's.
    """

    machine: Annotated[str, StringConstraints(pattern=r"^vmjobs-[A-Za-z0-9._-]{1,100}$")]
    hypervisor: HypervisorKind
    platform: str = Field(max_length=512)
    sentinel: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    guest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    ran: float = Field(ge=0, allow_inf_nan=False)
    heard: int = Field(default=0, ge=0)
    files: tuple[SavedFile, ...] = Field(max_length=32)
    making: Making | None = None


class Told(Frozen):
    """A value object that another part of vmjobs sends, which may be of a later release: what it has
    besides is left out.
    """

    model_config = ConfigDict(extra="ignore")


class JobTicket(Told):
    """What an agent gets for its claim: the spec as it is to run, and where to go on, if not at the
    beginning.

    tries_left: how often the job may be run again where this node fails it (:data:`MENDED_ELSEWHERE`).
    """

    job_id: str
    attempt: str
    index: int = Field(ge=0, description="place in its array, from 0")
    count: int = Field(ge=1)
    image_digest: Digest
    spec: JobSpec
    checkpoint: Checkpoint | None = None
    tries_left: int = Field(default=0, ge=0)


class Output(Frozen):
    """A file that a job delivered."""

    path: RelativePath
    size: int = Field(ge=0)
    digest: Digest


class JobEvent(Frozen):
    """One line of a job's history. ``seq`` counts from 1 within the job."""

    seq: int = Field(ge=1)
    time: datetime
    state: JobState
    reason: Reason
    attempt: str = ""


class CondorRef(Frozen):
    """Where a job is in HTCondor: schedd name and ``cluster.proc``."""

    schedd: str
    cluster: int
    proc: int
    grid_job_id: str = ""


class Job(Frozen):
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


class HypervisorInfo(Frozen):
    """What a node's probe found of one hypervisor. ``works`` means that a kernel booted."""

    kind: HypervisorKind
    works: bool
    detail: str = Field(default="", max_length=4096)
    seconds: float = Field(default=0.0, ge=0)
    version: str = Field(default="", max_length=256)
    cpus: int = Field(default=1, ge=1, description="that a machine of a job has at most")
    cloud_init: bool = Field(default=True, description="its kernel reads the disk of NoCloud data")


NodeName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")]


class Node(Told):
    """An execute node as it announces itself: what it has, caches and runs.

    image_names: what jobs called images that it caches. fault: why it takes no jobs for a while; "": it
    does. networks: what its machines can have.
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
    lent: int = Field(default=0, ge=0, description="MiB of memory that machines of jobs have")
    cluster_cpus: int = Field(default=0, ge=0, description="for machines of virtual clusters")
    cluster_memory: int = Field(default=0, ge=0, description="MiB, for virtual clusters")
    cluster_disk: int = Field(default=0, ge=0, description="MiB, for virtual clusters")
    fault: str = Field(default="", max_length=1024)
    networks: tuple[NetworkMode, ...] = Field(default=tuple(NetworkMode), max_length=16)
    updated: datetime


# --------------------------------------------------------------------------- functions


def now() -> datetime:
    """The present, in UTC."""
    return datetime.now(UTC)


def may_follow(old: JobState, new: JobState) -> bool:
    """Whether the table has a way from ``old`` to ``new``."""
    return new in TRANSITIONS[old]


def advance(old: JobState, new: JobState, *, job_id: str = "") -> JobState:
    """Check one step of a job.

    Raises:
        Conflict: the table has no such step.
    """
    if not may_follow(old, new):
        raise Conflict(f"job {job_id} is {old} and cannot become {new}")
    return new


#: Faults that are listed. Megabytes of hostile JSON may have millions, of hundreds of bytes each.
MAX_FAULTS: Final = 1000


#: In place of messages that show a regular expression, or speak of fields and inputs.
_PLAIN: Final = {
    "string_pattern_mismatch": "is not written as it has to be",
    "missing": "is missing",
    "extra_forbidden": "is not known here",
}
_IMAGE_NAMES: Final = "must be like muons:2026 or mygroup/muons:2026, in lower case"
_SHOULD: Final = re.compile(r"^[A-Z][a-z]+ should ")


def faults_of(error: ValidationError, prefix: str = "") -> list[Fault]:
    """Pydantic's findings as ours: one fault a field, none lost; or their number where it is absurd."""
    if (count := error.error_count()) > MAX_FAULTS:
        where = prefix.removesuffix(".")
        return [Fault(where, "too_many_faults", f"there are {count} faults, too many to list")]
    found = []
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in item["loc"])
        is_name = where == "image" and item["type"] == "string_pattern_mismatch"
        sentence = _IMAGE_NAMES if is_name else _sentence(item["type"], item["msg"])
        found.append(Fault(f"{prefix}{where}", item["type"], sentence))
    return found


def _sentence(kind: str, message: str) -> str:
    """Pydantic's message in words that need no knowledge of our types and expressions."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    return _SHOULD.sub("must ", message.removeprefix("Value error, "), count=1)


def parse_spec(data: Any) -> JobSpec:
    """A validated spec from decoded JSON.

    Raises:
        InvalidSpec: with every fault, not only the first.
    """
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise InvalidSpec("the job specification has faults", faults=faults_of(error)) from error
