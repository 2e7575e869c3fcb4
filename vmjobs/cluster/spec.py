"""What an operator declares: one virtual cluster. Nothing here does I/O."""

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
from vmjobs.model import Frozen, HypervisorKind, ImageRef, NetworkMode, faults_of

#: Machines in one cluster.
MAX_SIZE: Final = 1000
MAX_START: Final = 4096

#: A cluster's name is part of its machines' host names (RFC 1123): ``NAME-0``, ``NAME-1``, ...
ClusterName = Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$")]
#: A shell pattern for names of nodes.
NodePattern = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9*?][A-Za-z0-9._*?\[\]-]{0,254}$")]
#: As the setting ``pools`` names them; empty: its first.
PoolName = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,254})?$")]


def _one_fault(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """One fault, where each of the types would find its own."""
    try:
        return validate(value)
    except ValidationError as error:
        raise ValueError("must be true, false, a number, or at most 1024 characters of text") from error


#: What a machine-ad attribute of an operator's may be.
AttributeValue = Annotated[
    bool | int | float | Annotated[str, StringConstraints(max_length=1024)], WrapValidator(_one_fault)
]

_ATTRIBUTE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class Lifecycle(StrEnum):
    """Whether a machine's disks outlive a restart of it."""

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
            raise ValueError(f"{name} is there twice: attribute names know no upper and lower case")
        seen.add(name.lower())
        if isinstance(content, str):
            _one_line(content)
        if isinstance(content, float) and content - content != 0:
            raise ValueError(f"{name}: {content} is not a number that a ClassAd has")
    return value


class Size(Frozen):
    """How many machines: between ``min`` and ``max``, as idle jobs demand."""

    min: int = Field(ge=0, le=MAX_SIZE, strict=True)
    max: int = Field(ge=0, le=MAX_SIZE, strict=True)

    @model_validator(mode="after")
    def _in_order(self) -> Size:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is larger than max ({self.max})")
        return self


def _kind_of_size(value: Any) -> str:
    return "range" if isinstance(value, Size | dict) else "machines"


class Limits(Frozen):
    """What one machine of the cluster may use of its node at most; unset: as much as it can.

    cpu_percent: of one processor, per processor of the machine. cpu_weight: share of the processors
    where several machines want them (cgroup v2's ``cpu.weight``). disk_mib_s: MiB a second, read and
    written. network_mbit_s: Mbit a second, each way.
    """

    cpu_percent: int | None = Field(default=None, ge=1, le=100, strict=True)
    cpu_weight: int | None = Field(default=None, ge=1, le=10000, strict=True)
    disk_mib_s: int | None = Field(default=None, ge=1, strict=True)
    network_mbit_s: int | None = Field(default=None, ge=1, strict=True)


class ClusterSpec(Frozen):
    """One virtual cluster, as its operator declares it.

    size: machines, or a range of them. nodes: shell patterns, any of which a node's name must match;
    site: the site that nodes must belong to. pool: of the service's pools; empty: its first.
    attributes: for the machine ads of all machines. start: a ClassAd expression; jobs that it is not
    true for are not taken. boot_seconds: until the guest speaks; join_seconds: from then until a probe
    job ran in it; drain_seconds: that running jobs may still take when their machine is to go.
    idle_seconds: that a machine of a range of sizes is kept without need.
    """

    name: ClusterName
    image: ImageRef
    # Told apart by hand, so that a fault is told of what was meant alone.
    size: Annotated[
        Annotated[int, Field(ge=0, le=MAX_SIZE, strict=True), Tag("machines")]
        | Annotated[Size, Tag("range")],
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
    start: Annotated[str, StringConstraints(max_length=MAX_START), AfterValidator(_one_line)] = "True"
    limits: Limits = Limits()
    lifecycle: Lifecycle = Lifecycle.THROWAWAY
    boot_seconds: int = Field(default=180, ge=1, le=3600, strict=True)
    join_seconds: int = Field(default=180, ge=1, le=3600, strict=True)
    drain_seconds: int = Field(default=86400, ge=0, le=30 * 86400, strict=True)
    idle_seconds: int = Field(default=300, ge=0, le=30 * 86400, strict=True)

    @property
    def range(self) -> Size:
        """The size as a range."""
        return self.size if isinstance(self.size, Size) else Size(min=self.size, max=self.size)


def parse_cluster(data: Any) -> ClusterSpec:
    """A validated declaration from decoded JSON or YAML.

    Raises:
        InvalidSpec: with every fault, not only the first.
    """
    try:
        return ClusterSpec.model_validate(data)
    except ValidationError as error:
        raise InvalidSpec("the cluster's declaration has faults", faults=faults_of(error)) from error
