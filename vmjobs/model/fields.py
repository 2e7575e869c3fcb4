"""Types of fields: paths, digests, and names of images."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, StringConstraints

from vmjobs.paths import check_path


def _check_relative(value: str) -> str:
    if why := check_path(value):
        raise ValueError(f"{why}: it must be a plain path inside the job's directory")
    return value


RelativePath = Annotated[str, StringConstraints(max_length=255), AfterValidator(_check_relative)]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
#: The digest of a disk's or kernel's content: see ``images.content``.
ContentDigest = Annotated[str, StringConstraints(pattern=r"^tree:[0-9a-f]{64}$")]
#: The owner part of an image's name; ``library`` is the service's own.
Namespace = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
ImageName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Tag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$")]


def _reject_short_digest(value: str) -> str:
    if value.startswith("sha256:") and len(value) != len("sha256:") + 64:
        raise ValueError("a digest is 'sha256:' and 64 hexadecimal digits")
    return value


#: ``sha256:…``, or ``name``, ``name:tag``, ``namespace/name``, ``namespace/name:tag``.
ImageRef = Annotated[
    str,
    StringConstraints(
        pattern=r"^(sha256:[0-9a-f]{64}|([a-z0-9][a-z0-9._-]{0,63}/)?"
        r"[a-z0-9][a-z0-9._-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9._-]{0,63})?)$"
    ),
    AfterValidator(_reject_short_digest),
]
