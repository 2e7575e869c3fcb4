"""What an image is: a small JSON document that names its parts by digest.

The image's own digest is that of the document's canonical bytes, so an image reference pins every
byte of it. The bytes, not a re-serialisation of them, are what is stored and sent.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_serializer

from vmjobs.errors import DigestMismatch
from vmjobs.model import Digest, Frozen

#: A manifest larger than this is refused, in bytes.
MAX_BYTES = 4 * 1024 * 1024


class Blob(Frozen):
    """A part of an image. format: of a disk; raw is the only one, and is never guessed."""

    digest: Digest
    size: int = Field(ge=0, description="bytes")
    format: Literal["raw"] | None = None

    @model_serializer
    def _without_empty_format(self) -> dict[str, Any]:
        base: dict[str, Any] = {"digest": self.digest, "size": self.size}
        return base if self.format is None else {**base, "format": self.format}


class GuestSupport(Frozen):
    """What the image's guest program can do. contract: version of the guest contract."""

    contract: Literal[1] = 1


class ImageManifest(Frozen):
    """An image. kernel and initrd are for kvm and qemu; a UML machine brings its own kernel."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    architecture: str = Field(default="x86_64", pattern=r"^[a-z0-9_]{1,32}$")
    root: Blob
    kernel: Blob | None = None
    initrd: Blob | None = None
    cmdline: tuple[str, ...] = ()
    guest: GuestSupport = GuestSupport()
    recipe: Digest | None = None
    packages: dict[str, str] = Field(default_factory=dict)

    def canonical(self) -> bytes:
        """The bytes that are stored: sorted keys, no spaces, UTF-8."""
        value = self.model_dump(mode="json", by_alias=True)
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode("utf-8")

    @property
    def digest(self) -> str:
        """The image's digest."""
        return digest_of(self.canonical())

    def blobs(self) -> tuple[Blob, ...]:
        """The parts that there are, the root disk first."""
        return tuple(part for part in (self.root, self.kernel, self.initrd) if part is not None)

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
