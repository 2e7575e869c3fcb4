"""Image recipes: declare an image's content in TOML files that extend one another.

A file names the layers that it extends, and adds to them: ``full`` combines ``hep``, ``kerberos`` and
``root``. The builder gets one :class:`Recipe` with all layers. A recipe names no mirror and no host,
so that the same file builds the same image everywhere. A recipe that needs a site's own package
repository declares that, and the user names the repository for the build.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from vmjobs.errors import BuildError, Fault, InvalidRequest, NotFound, reason_of
from vmjobs.model import FrozenModel, faults_of

_PACKAGE: Final = r"^[a-z0-9][a-z0-9+.-]{1,99}$"
#: The most items of each kind in a recipe. The package names become one argument of a program, which
#: Linux limits to 128 KiB.
MAX_PACKAGES: Final = 1000
MAX_WHEELS: Final = 200
MAX_FILES: Final = 1000
MAX_DROPS: Final = 200
MAX_PROBES: Final = 50
MAX_VARIABLES: Final = 200
MAX_WORDS: Final = 64
#: Most characters of a probe, a file or a variable.
MAX_TEXT: Final = 65536


def _check_image_path(value: str) -> str:
    parts = value.split("/")
    if not value.startswith("/") or "" in parts[1:] or {".", ".."} & set(parts):
        raise ValueError("must be an absolute path in the image, without '.', '..' and '//'")
    if not value.isprintable() or any(len(part.encode()) > 255 for part in parts):
        raise ValueError("must have printable characters only, and names of at most 255 bytes")
    return value


Package = Annotated[str, StringConstraints(pattern=_PACKAGE)]
ImagePath = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_check_image_path)]
Module = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_-]{1,64}$")]
Version = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
RecipeName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Suite = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{1,63}$")]
Architecture = Literal["x86_64", "aarch64", "s390x"]
Parameter = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,256}$")]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
DropPattern = Annotated[str, StringConstraints(max_length=256)]


class Wheel(FrozenModel):
    """A Python wheel from the package index, pinned by version and hash."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    version: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.+!-]{1,64}$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class PythonPart(FrozenModel):
    """Wheels to install in ``target``. version: of the image's Python, as ``3.11``."""

    version: Annotated[str, StringConstraints(pattern=r"^3\.[0-9]{1,2}$")]
    target: ImagePath
    wheels: tuple[Wheel, ...] = Field(default=(), max_length=MAX_WHEELS)


class KernelPart(FrozenModel):
    """Kernel for kvm and qemu. package: Debian (meta)package; modules: in initrd."""

    package: Package
    modules: tuple[Module, ...] = Field(default=(), max_length=MAX_WORDS)


class FilePart(FrozenModel):
    """A small text file to add."""

    path: ImagePath
    text: Text
    executable: bool = False


class RecipeLayer(FrozenModel):
    """One recipe file. Values that it omits come from the layers that it extends.

    layers: recipes that this one extends, lowest first: names, or files beside this one.
    epoch: every time stamp in the image, seconds since 1970. slack: free MiB on the root disk (jobs
    have a disk of their own). drop: paths (or patterns, as in fnmatch) left out.
    architecture: of the image, as ``uname -m`` calls it; default: the builder's own.
    probe: a script that must exit with status 0 in a job before the image may be published.
    needs_repository: some packages are only in a site's own repository.
    allow_expired_archive: accept an archive whose Valid-Until has passed, as in frozen snapshots.
    Signatures are verified all the same, but a mirror that withholds updates goes undetected.
    """

    schema_version: int = Field(default=1, alias="schema", ge=1, le=1)
    name: RecipeName
    version: Version
    description: str = ""
    layers: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9./_-]{1,255}$")], ...] = ()
    suite: Suite | None = None
    architecture: Architecture | None = None
    epoch: int | None = Field(default=None, ge=0, lt=2**31)
    packages: tuple[Package, ...] = ()
    slack: int | None = Field(default=None, ge=1, le=65536, description="MiB")
    cmdline: tuple[Parameter, ...] | None = None
    drop: tuple[str, ...] = ()
    environment: dict[EnvName, str] = Field(default_factory=dict)
    kernel: KernelPart | None = None
    python: PythonPart | None = None
    files: tuple[FilePart, ...] = ()
    probe: str = Field(default="", max_length=65536)
    needs_repository: bool = False
    allow_expired_archive: bool = Field(default=False, strict=True)


class Recipe(FrozenModel):
    """The complete content of an image, with the fields of :class:`RecipeLayer`.

    layers: names of all its recipes, lowest first. probes: one script for each recipe that has one.
    """

    name: RecipeName
    version: Version
    description: Text = ""
    layers: tuple[RecipeName, ...] = Field(default=(), max_length=MAX_PROBES)
    suite: Suite
    architecture: Architecture | None = None
    epoch: int = Field(ge=0, lt=2**31)
    packages: tuple[Package, ...] = Field(min_length=1, max_length=MAX_PACKAGES)
    slack: int = Field(default=16, ge=1, le=65536, description="MiB")
    cmdline: tuple[Parameter, ...] = Field(default=(), max_length=MAX_WORDS)
    drop: tuple[DropPattern, ...] = Field(default=(), max_length=MAX_DROPS)
    environment: dict[EnvName, Text] = Field(default_factory=dict, max_length=MAX_VARIABLES)
    kernel: KernelPart | None = None
    python: PythonPart | None = None
    files: tuple[FilePart, ...] = Field(default=(), max_length=MAX_FILES)
    probes: tuple[Text, ...] = Field(default=(), max_length=MAX_PROBES)
    needs_repository: bool = False
    allow_expired_archive: bool = Field(default=False, strict=True)

    @property
    def digest(self) -> str:
        """Digest of the image's content, independent of the text and of the layers."""
        value = self.model_dump(mode="json", exclude={"description", "probes", "layers"})
        if not self.allow_expired_archive:
            del value["allow_expired_archive"]  # older recipes, without the field, keep their digests
        if self.architecture is None:
            del value["architecture"]  # likewise
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def compose(layers: Sequence[RecipeLayer]) -> Recipe:
    """Combine layers, lowest first, into a recipe with the name of the last one.

    Lists are concatenated; a single value comes from the last layer that has one.

    Raises:
        InvalidRequest: with one fault for each missing value and each contradiction.
    """
    top = layers[-1]
    faults = list(_contradictions(layers))
    values: dict[str, Any] = {"name": top.name, "version": top.version, "description": top.description}
    values["layers"] = tuple(layer.name for layer in layers)
    for field in ("suite", "architecture", "epoch", "slack", "cmdline", "kernel"):
        given = [getattr(layer, field) for layer in layers if getattr(layer, field) is not None]
        if given:
            values[field] = given[-1]
        elif field in {"suite", "epoch"}:
            faults.append(Fault(field, "missing", f"no layer of {top.name} has a {field}"))
    for field in ("packages", "drop"):
        values[field] = tuple(dict.fromkeys(item for la in layers for item in getattr(la, field)))
    if not values["packages"]:
        faults.append(Fault("packages", "missing", f"{top.name} has no packages"))
    values["environment"] = {k: v for layer in layers for k, v in layer.environment.items()}
    values["files"] = tuple({file.path: file for la in layers for file in la.files}.values())
    values["python"] = _merge_python([layer.python for layer in layers if layer.python is not None])
    values["probes"] = tuple(layer.probe for layer in layers if layer.probe)
    for field in ("needs_repository", "allow_expired_archive"):
        values[field] = any(getattr(layer, field) for layer in layers)
    if faults:
        listing = "; ".join(fault.message for fault in faults)
        raise InvalidRequest(f"recipe {top.name} has faults: {listing}", faults=faults)
    try:
        return Recipe(**values)
    except ValidationError as error:  # the layers together exceed a limit
        faults = faults_of(error)
        listing = "; ".join(f"{fault.field}: {fault.message}" for fault in faults)
        raise InvalidRequest(f"recipe {top.name} has faults: {listing}", faults=faults) from error


def _contradictions(layers: Sequence[RecipeLayer]) -> Iterator[Fault]:
    suites = {layer.suite: layer.name for layer in layers if layer.suite is not None}
    yield from _differing("suite", "layers are of different releases", suites)
    architectures = {la.architecture: la.name for la in layers if la.architecture is not None}
    yield from _differing("architecture", "layers are for different ones", architectures)
    if architectures.keys() - {"x86_64"} and any(la.python for la in layers):
        yield Fault("python", "contradiction", "Python wheels are for x86_64 alone")
    pythons = {f"{p.version} in {p.target}": la.name for la in layers if (p := la.python)}
    yield from _differing("python", "layers install for different Pythons", pythons)


def _differing(field: str, message: str, names: Mapping[Any, str]) -> Iterator[Fault]:
    """The fault of a field that has several values; names: of the last layer with each."""
    if len(names) > 1:
        found_values = ", ".join(f"{name}: {value}" for value, name in names.items())
        yield Fault(field, "contradiction", f"{message} ({found_values})")


def _merge_python(parts: Sequence[PythonPart]) -> PythonPart | None:
    if not parts:
        return None
    wheels = {wheel.name: wheel for part in parts for wheel in part.wheels}
    return PythonPart(version=parts[-1].version, target=parts[-1].target, wheels=tuple(wheels.values()))


def parse(text: str, source: str = "recipe") -> RecipeLayer:
    """Read one recipe file.

    Raises:
        InvalidRequest: with one fault for each error.
    """
    try:
        return RecipeLayer.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        fault = Fault("", "not_toml", str(error))
        raise InvalidRequest(f"{source} is not TOML: {error}", faults=[fault]) from error
    except ValidationError as error:
        faults = faults_of(error)
        listing = "; ".join(f"{f.field}: {f.message}" for f in faults)
        raise InvalidRequest(f"{source} has faults: {listing}", faults=faults) from error


def names() -> list[str]:
    """Names of the product's recipes."""
    folder = resources.files("images.recipes")
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def load(name_or_path: str) -> Recipe:
    """Load a recipe of the product by name, or a file (with a ``/`` or ``.toml``).

    Raises:
        NotFound: the recipe or one of its layers does not exist. InvalidRequest: it has faults.
        BuildError: it cannot be read.
    """
    return compose(list(_collect_layers(name_or_path, Path(), (), {}).values()))


def _collect_layers(
    ref: str, folder: Path, above: tuple[str, ...], found: dict[str, RecipeLayer]
) -> dict[str, RecipeLayer]:
    """The layers of ``ref``, each once, lowest first. above: layers that extend it."""
    in_file = "/" in ref or ref.endswith(".toml")
    key = str((folder / ref).resolve()) if in_file else ref
    if key in above:
        raise InvalidRequest(f"recipe dependency cycle: {' -> '.join((*above, key))}")
    if key not in found:
        layer = _read_file(folder / ref) if in_file else _read_shipped(ref)
        below = (folder / ref).parent if in_file else folder
        for other in layer.layers:
            _collect_layers(other, below, (*above, key), found)
        found[key] = layer
    return found


def _read_shipped(name: str) -> RecipeLayer:
    if name not in names():
        raise NotFound(f"there is no recipe {name!r}", hint=f"there are: {', '.join(names())}")
    text = (resources.files("images.recipes") / f"{name}.toml").read_text("utf-8")
    return parse(text, f"recipe {name}")


def _read_file(path: Path) -> RecipeLayer:
    try:
        return parse(path.read_text("utf-8"), str(path))
    except FileNotFoundError as error:
        raise NotFound(f"there is no recipe file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"cannot read {path}: {reason_of(error)}") from error
