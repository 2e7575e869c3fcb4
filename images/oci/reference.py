"""References to container images: in a registry, an OCI layout, or a Docker archive."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from vmjobs.errors import InvalidRequest

_HOST: Final = r"(?:[A-Za-z0-9][A-Za-z0-9-]*(?:\.[A-Za-z0-9-]+)*|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
_PART: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_TAG: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_NAMED: Final = re.compile(
    rf"(?P<name>(?:{_HOST}/)?{_PART}(?:/{_PART})*)(?::(?P<tag>{_TAG}))?(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?"
)
_DOCKER_HUB: Final = "docker.io"


class ContainerTransport(StrEnum):
    """Where a container image is, by the prefix of its reference."""

    REGISTRY = "oci:"
    LAYOUT = "oci-layout:"
    ARCHIVE = "docker-archive:"


_PREFIXES: Final = {
    **{transport.value: transport for transport in ContainerTransport},
    "docker://": ContainerTransport.REGISTRY,
}


@dataclass(frozen=True)
class ContainerReference:
    """A reference to a container image. name: in a registry; path: of a layout or an archive."""

    transport: ContainerTransport
    name: str = ""
    tag: str = ""
    digest: str = ""
    path: Path = Path()

    @property
    def text(self) -> str:
        if self.transport is ContainerTransport.REGISTRY:
            tag = f":{self.tag}" if self.tag else ""
            return f"{self.transport}{self.name}{tag}" + (f"@{self.digest}" if self.digest else "")
        return f"{self.transport}{self.path}" + (f":{self.tag}" if self.tag else "")

    @property
    def registry(self) -> str:
        """The registry's host, with its port if it has one."""
        first, slash, _ = self.name.partition("/")
        named = slash and ("." in first or ":" in first or first == "localhost")
        return first if named else _DOCKER_HUB

    @property
    def suggested_name(self) -> tuple[str, str]:
        """The default name and tag of the VM image."""
        stem = self.name.rpartition("/")[2] or self.path.name.partition(".")[0].lower()
        name = re.sub(r"[^a-z0-9._-]+", "-", stem).lstrip("._-")[:64] or "container"
        if self.tag and len(self.tag) <= 64:
            return name, self.tag
        return name, self.digest.removeprefix("sha256:")[:12] or "latest"


def is_reference(text: str) -> bool:
    """Whether ``text`` names a container image and not a VM image."""
    return text.startswith(tuple(_PREFIXES))


def parse(text: str) -> ContainerReference:
    """Read a reference: ``oci:registry.example/name:tag``, ``oci:…@sha256:…``, ``docker://…``,
    ``oci-layout:DIR[:tag]``, ``docker-archive:FILE``.

    Raises:
        InvalidRequest: it is not a reference.
    """
    for prefix, transport in _PREFIXES.items():
        if text.startswith(prefix):
            rest = text.removeprefix(prefix)
            found = (
                _in_registry(rest)
                if transport is ContainerTransport.REGISTRY
                else _in_file(transport, rest)
            )
            if found is not None:
                return found
    raise InvalidRequest(
        f"{text!r} is not a reference to a container image",
        hint="oci:REGISTRY/NAME:TAG, oci:REGISTRY/NAME@sha256:…, oci-layout:DIR[:TAG], "
        "docker-archive:FILE",
    )


def _in_registry(rest: str) -> ContainerReference | None:
    match = _NAMED.fullmatch(rest) if len(rest) <= 512 else None
    if match is None:
        return None
    tag, digest = match["tag"] or "", match["digest"] or ""
    if not tag and not digest:
        tag = "latest"
    return ContainerReference(ContainerTransport.REGISTRY, name=match["name"], tag=tag, digest=digest)


def _in_file(transport: ContainerTransport, rest: str) -> ContainerReference | None:
    if not rest or "\0" in rest:
        return None
    path, colon, tag = rest.rpartition(":")
    if transport is ContainerTransport.ARCHIVE or not colon or Path(rest).exists():
        return ContainerReference(transport, path=Path(rest))
    return ContainerReference(transport, path=Path(path), tag=tag) if re.fullmatch(_TAG, tag) else None
