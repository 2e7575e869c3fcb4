"""What an image is: a small JSON document that names its parts by digest.

The image's own digest is that of the document's canonical bytes, so an image reference pins every
byte of it. The bytes, not a re-serialisation of them, are what is stored and sent. Who owns an image,
what it is called and where it came from is not in it: the same disk, to be booted in the same way,
is the same image whoever brings it, in whatever format.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Final, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from images.content import MAX_SIZE
from vmjobs.errors import DigestMismatch
from vmjobs.model import (
    ABILITIES,
    BootMethod,
    ContentDigest,
    Digest,
    Environment,
    Frozen,
    HypervisorKind,
)

#: A manifest larger than this is refused, in bytes.
MAX_BYTES: Final = 4 * 1024 * 1024

#: What may be on a kernel's command line: one word of it.
KernelWord = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,256}$")]


class Part(Frozen):
    """A part of an image, by the digest of its content (:mod:`images.content`). size: bytes.

    A disk is always raw bytes: no format is recorded because none is ever looked for.
    """

    digest: ContentDigest
    size: int = Field(ge=1, le=MAX_SIZE, description="bytes")


class GuestSupport(Frozen):
    """What the image's guest program can do. contract: version of the guest contract. Nodes run scripts
    by version 3; the others are of earlier releases.
    """

    contract: Literal[1, 2, 3] = 1


#: A word of a program's command line: as long as Linux takes one.
Word = Annotated[str, StringConstraints(max_length=131071, pattern=r"^[^\x00]*$")]


class Program(Frozen):
    """What runs in the guest of a job that brings no script: a container's entry point.

    arguments: what runs, always. command: what follows, unless the job has arguments of its own.
    user: ``NAME``, ``UID``, ``NAME:GROUP`` or ``UID:GID``, looked up in the image; empty: root.
    """

    arguments: tuple[Word, ...] = Field(default=(), max_length=1024)
    command: tuple[Word, ...] = Field(default=(), max_length=1024)
    environment: Environment = Field(default_factory=dict)
    directory: str = Field(default="/", pattern=r"^/[^\x00]{0,4095}$")
    user: str = Field(default="", pattern=r"^[A-Za-z0-9_.:-]{0,128}$")


class ImageManifest(Frozen):
    """An image.

    boot: ``kernel``: the kernel that is kept with the image (a UML machine brings its own);
        ``bios`` and ``uefi``: what is on the disk.
    partition: where the root file system is, for ``boot: kernel``; 0: the disk itself is one.
    guest: ``None``: nothing is known of what is inside.
    cloud_init: the image looks for NoCloud data when it boots.
    parent: the image that this one was made from. recipe: the digest of what it was made by.
    """

    schema_version: Literal[2] = Field(default=2, alias="schema")
    architecture: str = Field(default="x86_64", pattern=r"^[a-z0-9_]{1,32}$")
    boot: BootMethod = BootMethod.KERNEL
    root: Part
    partition: int = Field(default=0, ge=0, le=128)
    kernel: Part | None = None
    initrd: Part | None = None
    cmdline: tuple[KernelWord, ...] = Field(default=(), max_length=64)
    guest: GuestSupport | None = None
    cloud_init: bool = False
    program: Program | None = None
    parent: Digest | None = None
    recipe: Digest | None = None
    packages: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _boots_somehow(self) -> Self:
        if self.boot is not BootMethod.KERNEL and (self.kernel or self.initrd or self.cmdline):
            raise ValueError(f"an image that boots by {self.boot} has no kernel, initrd or cmdline")
        if self.initrd and not self.kernel:
            raise ValueError("an initrd without a kernel boots nothing")
        return self

    def canonical(self) -> bytes:
        """The bytes that are stored: sorted keys, no spaces, UTF-8."""
        value = self.model_dump(mode="json", by_alias=True)
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode("utf-8")

    @property
    def digest(self) -> str:
        """The image's digest."""
        return digest_of(self.canonical())

    def parts(self) -> tuple[Part, ...]:
        """The parts that there are, the root disk first."""
        return tuple(part for part in (self.root, self.kernel, self.initrd) if part is not None)

    @property
    def size(self) -> int:
        """Bytes of all parts together."""
        return sum(part.size for part in self.parts())

    @property
    def hypervisors(self) -> tuple[HypervisorKind, ...]:
        """What can boot it, best first."""
        if self.boot is not BootMethod.KERNEL:
            return (HypervisorKind.KVM, HypervisorKind.QEMU)
        if self.kernel is None:
            return (HypervisorKind.UML,)
        # The guest that we put into an image runs on any kernel; what is unknown wants its own.
        return tuple(kind for kind in HypervisorKind if ABILITIES[kind].own_kernel or self.guest)

    @property
    def renews(self) -> bool:
        """Whether its guest takes another token where its machine was saved (guest contract 3)."""
        return self.guest is not None and self.guest.contract > 2

    @classmethod
    def parse(cls, data: bytes, digest: str) -> Self:
        """The manifest that ``data`` is, checked against the digest by which it was asked for.

        Raises:
            DigestMismatch: the bytes are others, or are no manifest.
        """
        if digest_of(data) != digest:
            raise DigestMismatch(f"the manifest {digest} is damaged: its bytes have another digest")
        if len(data) > MAX_BYTES:
            raise DigestMismatch(f"the manifest {digest} has {len(data)} bytes, over the limit")
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise DigestMismatch(
                f"{digest} is not an image manifest: {where}: {first['msg']}"
            ) from error


def digest_of(data: bytes) -> str:
    """Digest of some bytes, ``sha256:`` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
