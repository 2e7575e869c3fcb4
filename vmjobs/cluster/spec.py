"""The declaration of a virtual cluster, as an operator writes it. No I/O."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from vmjobs.errors import InvalidSpec
from vmjobs.model import FrozenModel, HypervisorKind, ImageRef, NetworkMode, faults_of

#: Maximum VMs of one cluster, and characters of a START expression.
MAX_SIZE: Final = 1000
MAX_START_CHARACTERS: Final = 4096

#: A cluster's name is part of its VMs' host names (RFC 1123): ``NAME-0``, ``NAME-1``, ...
ClusterName = Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$")]
#: A shell pattern for node names.
NodePattern = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9*?][A-Za-z0-9._*?\[\]-]{0,254}$")]
#: A pool's name in the setting ``pools``; empty: the first pool.
PoolName = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,254})?$")]


def _one_fault(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Report one error instead of one for each type of the union."""
    try:
        return validate(value)
    except ValidationError as error:
        raise ValueError("must be true, false, a number, or at most 1024 characters of text") from error


#: The value of an operator's machine-ad attribute.
AttributeValue = Annotated[
    bool | int | float | Annotated[str, StringConstraints(max_length=1024)], WrapValidator(_one_fault)
]

_ATTRIBUTE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class Lifecycle(StrEnum):
    """Whether a VM's disks persist over its restarts."""

    THROWAWAY = "throwaway"
    PERSISTENT = "persistent"


def _one_line(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must be one line of printable characters")
    return value


def _attributes(value: dict[str, AttributeValue]) -> dict[str, AttributeValue]:
    seen: set[str] = set()
    for name, content in value.items():
        if not _ATTRIBUTE.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a ClassAd attribute")
        if name.lower() in seen:
            raise ValueError(f"{name} is repeated: attribute names ignore upper and lower case")
        seen.add(name.lower())
        if isinstance(content, str):
            _one_line(content)
        if isinstance(content, float) and content - content != 0:
            raise ValueError(f"{name}: {content} is not a ClassAd number")
    return value


class SizeRange(FrozenModel):
    """A range of sizes: between ``min`` and ``max`` VMs, by the demand of idle jobs."""

    min: int = Field(ge=0, le=MAX_SIZE, strict=True)
    max: int = Field(ge=0, le=MAX_SIZE, strict=True)

    @model_validator(mode="after")
    def _in_order(self) -> SizeRange:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is larger than max ({self.max})")
        return self


def _kind_of_size(value: Any) -> str:
    return "range" if isinstance(value, SizeRange | dict) else "machines"


class ClusterVmLimits(FrozenModel):
    """Maximum resources of its node that one VM of the cluster may use; unset: no limit.

    cpu_percent: of one processor, per processor of the VM. cpu_weight: share of the processors if
    several VMs compete (cgroup v2's ``cpu.weight``). disk_mib_s: MiB a second, read and written.
    network_mbit_s: Mbit a second, each way.
    """

    cpu_percent: int | None = Field(default=None, ge=1, le=100, strict=True)
    cpu_weight: int | None = Field(default=None, ge=1, le=10000, strict=True)
    disk_mib_s: int | None = Field(default=None, ge=1, strict=True)
    network_mbit_s: int | None = Field(default=None, ge=1, strict=True)


class ClusterSpec(FrozenModel):
    """One virtual cluster, as its operator declares it.

    size: number of VMs, or a range. nodes: shell patterns, any of which a node's name must match;
    site: of its nodes. pool: one of the service's pools; empty: the first. attributes: for the machine
    ads of all VMs. start: a ClassAd expression; VMs run only jobs for which it is true. boot_seconds:
    until the guest is ready; join_seconds: from then until its probe job has run; drain_seconds: for
    running jobs of a VM that drains. idle_seconds: that a surplus VM of a range of sizes is kept.
    """

    name: ClusterName
    image: ImageRef
    # An explicit discriminator, so that errors concern only the intended type.
    size: Annotated[
        Annotated[int, Field(ge=0, le=MAX_SIZE, strict=True), Tag("machines")]
        | Annotated[SizeRange, Tag("range")],
        Discriminator(_kind_of_size),
    ]
    cpus: int = Field(default=1, ge=1, le=256, strict=True)
    memory: int = Field(default=1024, ge=64, le=4 * 1024 * 1024, strict=True, description="MiB")
    disk: int = Field(default=4096, ge=64, le=64 * 1024 * 1024, strict=True, description="MiB for jobs")
    hypervisor: HypervisorKind | None = None
    network: NetworkMode = NetworkMode.OUTBOUND
    nodes: tuple[NodePattern, ...] = Field(default=(), max_length=1000)
    site: str = Field(default="", max_length=255)
    pool: PoolName = ""
    attributes: Annotated[dict[str, AttributeValue], AfterValidator(_attributes)] = Field(
        default_factory=dict, max_length=100
    )
    start: Annotated[
        str, StringConstraints(max_length=MAX_START_CHARACTERS), AfterValidator(_one_line)
    ] = "True"
    limits: ClusterVmLimits = ClusterVmLimits()
    lifecycle: Lifecycle = Lifecycle.THROWAWAY
    boot_seconds: int = Field(default=180, ge=1, le=3600, strict=True)
    join_seconds: int = Field(default=180, ge=1, le=3600, strict=True)
    drain_seconds: int = Field(default=86400, ge=0, le=30 * 86400, strict=True)
    idle_seconds: int = Field(default=300, ge=0, le=30 * 86400, strict=True)

    @property
    def range(self) -> SizeRange:
        return (
            self.size if isinstance(self.size, SizeRange) else SizeRange(min=self.size, max=self.size)
        )


def parse_cluster(data: Any) -> ClusterSpec:
    """Validate a declaration from decoded JSON or YAML.

    Raises:
        InvalidSpec: with all errors, not only the first.
    """
    try:
        return ClusterSpec.model_validate(data)
    except ValidationError as error:
        raise InvalidSpec("the cluster's declaration has faults", faults=faults_of(error)) from error
