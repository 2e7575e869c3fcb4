"""An execute node."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from vmjobs.model.base import FrozenModel, LenientModel
from vmjobs.model.fields import Digest, ImageRef
from vmjobs.model.hypervisors import NODE_ARCHITECTURE, HypervisorKind, NetworkMode

NodeName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")]


class HypervisorInfo(FrozenModel):
    """A node's probe result for one hypervisor. ``works``: a kernel booted."""

    kind: HypervisorKind
    works: bool
    detail: str = Field(default="", max_length=4096)
    seconds: float = Field(default=0.0, ge=0)
    version: str = Field(default="", max_length=256)
    cpus: int = Field(default=1, ge=1, description="maximum for the VM of a job")
    cloud_init: bool = Field(default=True, description="its kernel reads the disk of NoCloud data")
    architectures: tuple[str, ...] = Field(
        default=(), max_length=16, description="besides the node's own, as `uname -m` calls them"
    )

    def can_run(self, architecture: str) -> bool:
        """Whether it works, and its VMs can have this architecture."""
        return self.works and architecture in {NODE_ARCHITECTURE, *self.architectures}


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
