"""Image manifests: small JSON documents that name the parts of an image by digest.

The image's digest is the digest of the document's canonical bytes, so it pins every byte of the
image. These bytes are stored and sent, not a re-serialisation. The manifest has no owner, name or
origin: the same disk with the same boot method is the same image for every owner and input format.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Final, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from images.content import MAX_CONTENT_BYTES
from vmjobs.errors import DigestMismatch
from vmjobs.model import (
    CAPABILITIES,
    NODE_ARCHITECTURE,
    BootMethod,
    ContentDigest,
    Digest,
    Environment,
    FrozenModel,
    HypervisorKind,
)

#: Largest manifest that is accepted, in bytes.
MAX_MANIFEST_BYTES: Final = 4 * 1024 * 1024

#: Architectures, as ``uname -m`` calls them: their names for Debian and in container images.
ARCHITECTURE_NAMES: Final = {"x86_64": "amd64", "aarch64": "arm64", "s390x": "s390x"}

#: One word of a kernel command line.
KernelWord = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,256}$")]


class Part(FrozenModel):
    """A part of an image: the digest of its content (:mod:`images.content`), its size.

    A disk is always raw bytes, so there is no format to record.
    """

    digest: ContentDigest
    size: int = Field(ge=1, le=MAX_CONTENT_BYTES, description="bytes")


class GuestSupport(FrozenModel):
    """Capabilities of the image's guest program.

    contract: version of the guest contract. Nodes run scripts with version 3; earlier releases used
    the others.
    """

    contract: Literal[1, 2, 3] = 1


#: A word of a program's command line: at most as long as Linux accepts.
ProgramWord = Annotated[str, StringConstraints(max_length=131071, pattern=r"^[^\x00]*$")]


class Program(FrozenModel):
    """The program that a job without a script runs: a container's entry point.

    arguments: the first words of its command line. command: the words after them, unless the job has
    arguments. user: ``NAME``, ``UID``, ``NAME:GROUP`` or ``UID:GID`` of the image; empty: root.
    """

    arguments: tuple[ProgramWord, ...] = Field(default=(), max_length=1024)
    command: tuple[ProgramWord, ...] = Field(default=(), max_length=1024)
    environment: Environment = Field(default_factory=dict)
    directory: str = Field(default="/", pattern=r"^/[^\x00]{0,4095}$")
    user: str = Field(default="", pattern=r"^[A-Za-z0-9_.:-]{0,128}$")


class ImageManifest(FrozenModel):
    """An image.

    boot: ``kernel``: the kernel that is stored with the image (UML has its own kernel); ``bios`` and
        ``uefi``: the boot loader on the disk.
    partition: of the root file system, for ``boot: kernel``; 0: the disk is one file system.
    guest: ``None``: the software in the image is unknown.
    xen: the kernel runs paravirtualized on Xen, and finds the root disk there; for ``bios``, the one
        that the GRUB menu on the disk starts.
    cloud_init: the image looks for NoCloud data when it boots.
    parent: the image that this one was made from. recipe: digest of the recipe it was built from.
    """

    schema_version: Literal[2] = Field(default=2, alias="schema")
    architecture: str = Field(default=NODE_ARCHITECTURE, pattern=r"^[a-z0-9_]{1,32}$")
    boot: BootMethod = BootMethod.KERNEL
    root: Part
    partition: int = Field(default=0, ge=0, le=128)
    kernel: Part | None = None
    initrd: Part | None = None
    cmdline: tuple[KernelWord, ...] = Field(default=(), max_length=64)
    guest: GuestSupport | None = None
    xen: bool = False
    cloud_init: bool = False
    program: Program | None = None
    parent: Digest | None = None
    recipe: Digest | None = None
    packages: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_boot_fields(self) -> Self:
        if self.boot is not BootMethod.KERNEL and self.architecture != NODE_ARCHITECTURE:
            raise ValueError(
                f"a disk that boots by {self.boot} must be for x86_64; "
                f"an image for {self.architecture} needs a kernel beside the disk"
            )
        if self.boot is not BootMethod.KERNEL and (self.kernel or self.initrd or self.cmdline):
            raise ValueError(f"an image that boots by {self.boot} has no kernel, initrd or cmdline")
        if (self.initrd or (self.xen and self.boot is not BootMethod.BIOS)) and not self.kernel:
            raise ValueError(
                "an initrd needs a kernel, and an image for Xen needs one or boots by bios"
            )
        return self

    def canonical(self) -> bytes:
        """The stored form: sorted keys, no spaces, UTF-8."""
        value = self.model_dump(mode="json", by_alias=True)
        if not self.xen:  # digests of images without it stay the same
            del value["xen"]
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode("utf-8")

    @property
    def digest(self) -> str:
        return sha256_digest(self.canonical())

    def parts(self) -> tuple[Part, ...]:
        """The parts that the image has, the root disk first."""
        return tuple(part for part in (self.root, self.kernel, self.initrd) if part is not None)

    @property
    def size(self) -> int:
        """Total size of all parts, in bytes."""
        return sum(part.size for part in self.parts())

    @property
    def hypervisors(self) -> tuple[HypervisorKind, ...]:
        """The hypervisors that can boot the image, best first."""
        able = [kind for kind in HypervisorKind if self.boot in CAPABILITIES[kind].boots]
        if self.architecture != NODE_ARCHITECTURE:
            able = [kind for kind in able if CAPABILITIES[kind].emulated]
        if not self.xen:
            able = [kind for kind in able if kind is not HypervisorKind.XEN]
        if self.boot is not BootMethod.KERNEL:
            return tuple(able)
        own = [kind for kind in able if CAPABILITIES[kind].boots_image_kernel]
        if self.kernel is None:
            return tuple(kind for kind in able if kind not in own)
        # The product's guest program runs on any kernel; an unknown system needs its own.
        return tuple(able if self.guest else own)

    @property
    def renews(self) -> bool:
        """Whether the guest accepts a new token when it resumes (guest contract 3)."""
        return self.guest is not None and self.guest.contract > 2

    @classmethod
    def parse(cls, data: bytes, digest: str) -> Self:
        """Parse a manifest and verify it against the image's digest.

        Raises:
            DigestMismatch: the digest does not match, or the bytes are not a manifest.
        """
        if sha256_digest(data) != digest:
            raise DigestMismatch(f"the manifest {digest} is damaged: its digest does not match")
        if len(data) > MAX_MANIFEST_BYTES:
            raise DigestMismatch(f"the manifest {digest} has {len(data)} bytes, over the limit")
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise DigestMismatch(f"{digest} is not an image manifest: {first_fault(error)}") from error


def first_fault(error: ValidationError) -> str:
    """Place and message of the first error in a document."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def sha256_digest(data: bytes) -> str:
    """Digest of bytes, ``sha256:`` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
