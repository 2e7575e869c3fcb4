"""The specification of a job, as its user submits it."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from vmjobs.errors import InvalidSpec
from vmjobs.model.base import MIB, FrozenModel, faults_of
from vmjobs.model.fields import Digest, ImageRef, RelativePath
from vmjobs.model.hypervisors import (
    CAPABILITIES,
    HypervisorKind,
    NetworkMode,
    check_checkpoint,
    kinds_with_cpus,
)

MAX_SCRIPT_BYTES: Final = 256 * 1024
MAX_ARRAY: Final = 1000
#: Prefix of a rule about the console; a regular expression follows.
CONSOLE_RULE: Final = "console:"
MAX_PATTERN: Final = 512
REPORT: Final = "report"
POWEROFF: Final = "poweroff"
STARTED: Final = "started"
#: Names of environment variables.
VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class Strategy(StrEnum):
    """How a job uses a virtual machine."""

    SCRIPT = "script"
    IMAGE = "image"


def _reject_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not have a NUL byte")
    return value


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


def _check_rule(value: str, words: tuple[str, ...]) -> str:
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


ExitRule = Annotated[str, AfterValidator(partial(_check_rule, words=(REPORT, POWEROFF)))]
ReadyRule = Annotated[str, AfterValidator(partial(_check_rule, words=(REPORT, STARTED)))]
Label = Annotated[str, StringConstraints(max_length=63, pattern=r"^[A-Za-z0-9._/-]+$")]
Argument = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_reject_nul)]
Environment = Annotated[dict[str, str], AfterValidator(_check_environment)]


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
    exit: ExitRule = REPORT
    ready: ReadyRule | None = None
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


def parse_spec(data: Any) -> JobSpec:
    """Validate a spec from decoded JSON.

    Raises:
        InvalidSpec: with every fault, not only the first.
    """
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise InvalidSpec("the job specification has faults", faults=faults_of(error)) from error
