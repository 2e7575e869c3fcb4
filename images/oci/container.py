"""Read a container image's documents: its manifest and its configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import Field, ValidationError

from images.manifest import ARCHITECTURE_NAMES, Program, first_fault, sha256_digest
from vmjobs.errors import DigestMismatch, ImageRejected
from vmjobs.model import NODE_ARCHITECTURE, VARIABLE_NAME, Digest, LenientModel

#: The only architecture with a kernel for container images.
ARCHITECTURE: Final = ARCHITECTURE_NAMES[NODE_ARCHITECTURE]
#: Larger documents are refused, in bytes.
MAX_DOCUMENT: Final = 8 * 1024 * 1024
MAX_LAYERS: Final = 512

_MANIFESTS: Final = {
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
}
_INDEXES: Final = {
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
}

_M = TypeVar("_M", bound=LenientModel)


class Descriptor(LenientModel):
    """Names a blob. size: bytes."""

    media_type: str = Field(default="", alias="mediaType")
    digest: Digest
    size: int = Field(ge=0)


class ContainerManifest(LenientModel):
    """An image in a registry: its configuration and its layers, lowest first."""

    schema_version: int = Field(alias="schemaVersion")
    media_type: str = Field(default="", alias="mediaType")
    config: Descriptor
    layers: tuple[Descriptor, ...] = Field(max_length=MAX_LAYERS)


class _ProcessConfig(LenientModel):
    env: tuple[str, ...] | None = Field(default=None, alias="Env")
    entrypoint: tuple[str, ...] | None = Field(default=None, alias="Entrypoint")
    cmd: tuple[str, ...] | None = Field(default=None, alias="Cmd")
    directory: str | None = Field(default=None, alias="WorkingDir")
    user: str | None = Field(default=None, alias="User")


class _RootFs(LenientModel):
    diff_ids: tuple[Digest, ...] = Field(max_length=MAX_LAYERS)


class ContainerConfig(LenientModel):
    """A container image's configuration: its platform, and how it is run."""

    architecture: str
    os: str
    config: _ProcessConfig | None = None
    rootfs: _RootFs


@dataclass(frozen=True)
class ContainerImage:
    """A container image's documents, which are consistent. digest: of its manifest."""

    digest: str
    layers: tuple[Descriptor, ...]
    configuration: ContainerConfig


def digest_checked(data: bytes, digest: str, what: str) -> bytes:
    """Return ``data`` if it has this digest.

    Raises:
        DigestMismatch: it has another one.
    """
    found = sha256_digest(data)
    if found != digest:
        raise DigestMismatch(f"{what} is damaged: it has the digest {found} (expected {digest})")
    return data


def read_manifest(data: bytes) -> ContainerManifest:
    """Read the manifest of one image.

    Raises:
        ImageRejected: it is not one.
    """
    document = _parse_document(data, "manifest")
    kind = document.get("mediaType") or ""
    if document.get("schemaVersion") == 1:
        raise ImageRejected("the container image has a manifest of version 1, which is too old")
    if kind and kind not in _MANIFESTS:
        raise ImageRejected(f"{kind} is not a container image")
    manifest = _validate(ContainerManifest, document, "manifest")
    for layer in manifest.layers:
        if layer.media_type.endswith("+encrypted"):
            raise ImageRejected(f"layer {layer.digest} is encrypted")
    return manifest


def is_index(data: bytes) -> bool:
    """Whether ``data`` lists images for several architectures."""
    document = _parse_document(data, "manifest")
    return document.get("mediaType") in _INDEXES or "manifests" in document


def index_digests(data: bytes) -> set[str]:
    """Digests of the images that an index lists."""
    listed = _parse_document(data, "index").get("manifests")
    items = listed if isinstance(listed, list) else []
    return {str(item.get("digest")) for item in items if isinstance(item, dict)}


def read_configuration(data: bytes, manifest: ContainerManifest) -> ContainerConfig:
    """Read the configuration that belongs to ``manifest``.

    Raises:
        ImageRejected: it does not match, or is for another architecture or operating system.
    """
    found = _validate(ContainerConfig, _parse_document(data, "configuration"), "configuration")
    if found.os != "linux" or found.architecture != ARCHITECTURE:
        raise ImageRejected(
            f"the container image is for {found.os}/{found.architecture}, not linux/{ARCHITECTURE}"
        )
    if len(found.rootfs.diff_ids) != len(manifest.layers):
        raise ImageRejected(
            f"the container image has {len(manifest.layers)} layers, but its configuration "
            f"lists {len(found.rootfs.diff_ids)}"
        )
    return found


def program_of(configuration: ContainerConfig) -> tuple[Program, list[str]]:
    """The container's program, and the variables left out because a shell cannot set them.

    Raises:
        ImageRejected: it cannot be run.
    """
    run = configuration.config or _ProcessConfig()
    environment, dropped = {}, []
    for line in run.env or ():
        name, _, value = line.partition("=")
        if VARIABLE_NAME.fullmatch(name):
            environment[name] = value
        else:
            dropped.append(name)
    directory = run.directory or "/"
    try:
        program = Program(
            arguments=run.entrypoint or (),
            command=run.cmd or (),
            environment=environment,
            directory=directory if directory.startswith("/") else f"/{directory}",
            user=run.user or "",
        )
    except ValidationError as error:
        raise ImageRejected(f"the container cannot be run: {first_fault(error)}") from error
    return program, dropped


def _parse_document(data: bytes, what: str) -> dict[str, Any]:
    if len(data) > MAX_DOCUMENT:
        raise ImageRejected(f"the container image's {what} has {len(data)} bytes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ImageRejected(f"the container image's {what} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ImageRejected(f"the container image's {what} is not an object")
    return document


def _validate(model: type[_M], document: dict[str, Any], what: str) -> _M:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise ImageRejected(
            f"the container image's {what} has a fault: {first_fault(error)}"
        ) from error
