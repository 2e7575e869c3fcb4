"""The checkpoint of a job: its saved VM."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from vmjobs.model.base import FrozenModel
from vmjobs.model.fields import ContentDigest, Digest, ImageRef, RelativePath
from vmjobs.model.hypervisors import HypervisorKind, NetworkMode


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
