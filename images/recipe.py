"""Image recipes: what goes into an image, declared in a TOML file.

A recipe names no mirror and no host, so that the same file builds the same image anywhere.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from vmjobs.errors import BuildError, Fault, InvalidRequest, NotFound
from vmjobs.model import Frozen

_PACKAGE: Final = r"^[a-z0-9][a-z0-9+.-]+$"


def _inside(value: str) -> str:
    parts = value.split("/")
    if not value.startswith("/") or "" in parts[1:] or {".", ".."} & set(parts):
        raise ValueError("must be an absolute path in the image, without '.', '..' and '//'")
    return value


Package = Annotated[str, StringConstraints(pattern=_PACKAGE)]
ImagePath = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_inside)]
Module = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_-]+$")]
Parameter = Annotated[str, StringConstraints(pattern=r"^[!-~]+$")]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Wheel(Frozen):
    """A Python wheel from the package index, pinned by version and hash."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    version: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.+!-]+$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class PythonPart(Frozen):
    """Wheels to install. version: of the image's interpreter, e.g. ``3.11``; target: where to."""

    version: Annotated[str, StringConstraints(pattern=r"^3\.[0-9]{1,2}$")]
    target: ImagePath
    wheels: tuple[Wheel, ...] = ()


class KernelPart(Frozen):
    """Kernel for kvm and qemu. package: Debian (meta) package; modules: for the initial RAM disk."""

    package: Package
    modules: tuple[Module, ...] = ()


class FilePart(Frozen):
    """A small text file to add."""

    path: ImagePath
    text: str
    executable: bool = False


class Recipe(Frozen):
    """What an image consists of.

    epoch: every time stamp in the image, seconds since 1970. slack: free MiB on the root disk (jobs
    have a disk of their own). drop: paths (or patterns, as in fnmatch) left out.
    """

    schema_version: int = Field(default=1, alias="schema", ge=1, le=1)
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    version: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    description: str = ""
    suite: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]+$")]
    epoch: int = Field(ge=0, lt=2**31)
    packages: tuple[Package, ...] = Field(min_length=1)
    slack: int = Field(default=16, ge=1, le=65536, description="MiB")
    cmdline: tuple[Parameter, ...] = ()
    drop: tuple[str, ...] = ()
    environment: dict[EnvName, str] = Field(default_factory=dict)
    kernel: KernelPart | None = None
    python: PythonPart | None = None
    files: tuple[FilePart, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of what the recipe says, not of how its file is written."""
        value = self.model_dump(mode="json", by_alias=True)
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def parse(text: str, source: str = "recipe") -> Recipe:
    """Read a recipe.

    Raises:
        InvalidRequest: with one fault for everything that is wrong with it.
    """
    try:
        return Recipe.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        fault = Fault("", "not_toml", str(error))
        raise InvalidRequest(f"{source} is not TOML: {error}", faults=[fault]) from error
    except ValidationError as error:
        faults = [
            Fault(".".join(map(str, e["loc"])), e["type"], e["msg"].removeprefix("Value error, "))
            for e in error.errors(include_url=False)
        ]
        listing = "; ".join(f"{f.field}: {f.message}" for f in faults)
        raise InvalidRequest(f"{source} has faults: {listing}", faults=faults) from error


def names() -> list[str]:
    """The recipes that come with the product."""
    folder = resources.files("images.recipes")
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def load(name_or_path: str) -> Recipe:
    """A recipe of the product's by its name, or one from a file (anything with a ``/`` or ``.toml``).

    Raises:
        NotFound: there is none. InvalidRequest: it has faults. BuildError: it cannot be read.
    """
    if "/" not in name_or_path and not name_or_path.endswith(".toml"):
        if name_or_path not in names():
            raise NotFound(
                f"there is no recipe {name_or_path!r}", hint=f"there are: {', '.join(names())}"
            )
        text = (resources.files("images.recipes") / f"{name_or_path}.toml").read_text("utf-8")
        return parse(text, f"recipe {name_or_path}")
    try:
        return parse(Path(name_or_path).read_text("utf-8"), name_or_path)
    except FileNotFoundError as error:
        raise NotFound(f"there is no recipe file {name_or_path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"cannot read {name_or_path}: {error}") from error
