"""Make a file tree from Debian packages: run mmdebstrap, and drop what no image needs."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import platform
import re
import shlex
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from images.build.process import run
from images.build.scratch_dir import ScratchDir
from images.build.tree import FileNode, FileTree, in_memory
from images.manifest import ARCHITECTURE_NAMES
from images.recipe import Recipe
from vmjobs.errors import BuildError, InvalidRequest, VMJobsError
from vmjobs.subprocess import run as run_program

#: Fetching and installing packages, in seconds.
_TIMEOUT: Final = 1800.0
#: Deadline of a test whether a program of another architecture runs here.
_TEST_SECONDS: Final = 30.0
KERNEL_FOLDER: Final = ".kernel"

#: Left out of every image: files that differ between builds, that name the build host, or that no job
#: reads. Patterns as in fnmatch, where ``*`` also matches ``/``.
DROPPED: Final = (
    f"{KERNEL_FOLDER}*",
    ".dockerenv",
    "boot/*",
    "dev/*",
    "proc/*",
    "sys/*",
    "run/*",
    "tmp/*",
    "etc/apt/sources.list*",
    "etc/hostname",
    "etc/machine-id",
    "etc/resolv.conf",
    "etc/.pwd.lock",
    "etc/*-",
    "var/lib/dbus/machine-id",
    "var/lib/systemd/*",
    "var/lib/apt/*",
    "var/lib/dpkg/*-old",
    "var/lib/dpkg/lock*",
    "var/lib/dpkg/info/*",
    "var/cache/*",
    "var/log/*",
    "usr/share/doc/*",
    "usr/share/man/*",
    "usr/share/info/*",
    "usr/share/locale/*",
    "usr/share/lintian/*",
    "usr/share/bug/*",
    "usr/share/bash-completion/*",
    "usr/share/doc-base/*",
)


#: Debian's own packages, beside a site's.
_MIRROR: Final = "http://deb.debian.org/debian"
_SOURCE_LINE: Final = re.compile(r"deb https?://[A-Za-z0-9._~:/%+-]+ [A-Za-z0-9./_-]+( [a-z0-9-]+)*")


@dataclass(frozen=True)
class SiteRepository:
    """A repository of a site's own packages.

    line: as in sources.list, ``deb URL SUITE COMPONENT...``. key: file with the key that signs it.
    """

    line: str
    key: Path

    def __post_init__(self) -> None:
        if not _SOURCE_LINE.fullmatch(self.line):
            raise InvalidRequest(
                f"{self.line!r} is not a package repository", hint="deb URL SUITE COMPONENT..."
            )
        if not self.key.is_file():
            raise InvalidRequest(f"key of the package repository: not found: {self.key}")


def is_foreign(recipe: Recipe) -> bool:
    """Whether the image has another architecture than this host: its programs run in QEMU."""
    return recipe.architecture not in {None, platform.machine()}


def archive_path(recipe: Recipe, folder: Path, repository: SiteRepository | None = None) -> Path:
    """Path of the archive of a recipe's packages, which need not exist."""
    kernel = recipe.kernel.package if recipe.kernel else ""
    inputs = [recipe.suite, sorted(recipe.packages), kernel, recipe.epoch]
    if repository is not None:
        inputs.append(repository.line)
    if recipe.allow_expired_archive:
        inputs.append("expired")
    if is_foreign(recipe):
        inputs.append(recipe.architecture)
    key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
    return folder / f"{recipe.suite}-{key}.tar"


def archive_lock(archive: Path) -> Path:
    """Path of an archive's lock: builds hold it while they make or read the archive."""
    return archive.with_suffix(".lock")


def bootstrap(
    recipe: Recipe,
    folder: Path,
    place: ScratchDir,
    *,
    force: bool = False,
    repository: SiteRepository | None = None,
) -> Path:
    """Make a tar archive of the recipe's packages in ``folder``; an existing one is reused.

    Raises:
        BuildError: mmdebstrap is missing or failed.
    """
    archive = archive_path(recipe, folder, repository)
    if archive.exists() and not force:
        return archive
    kernel = recipe.kernel.package if recipe.kernel else ""
    folder.mkdir(parents=True, exist_ok=True)
    part = place.folder / archive.name
    command = ["mmdebstrap", "--mode=auto", "--variant=essential", "--format=tar", "--quiet"]
    command += [f"--include={','.join(sorted(recipe.packages))}"]
    if recipe.architecture is not None and is_foreign(recipe):
        name = ARCHITECTURE_NAMES[recipe.architecture]
        _check_emulation(recipe, name)
        command.append(f"--architectures={name}")
    dated = {"SOURCE_DATE_EPOCH": str(recipe.epoch)}
    try:
        with resources.as_file(resources.files("images.build") / "fetch-kernel.sh") as hook:
            if kernel:
                words = shlex.join(["sh", str(hook.resolve()), kernel])
                command.append(f'--customize-hook={words} "$1"')
            command += [recipe.suite, str(part), *sources(recipe, repository)]
            run(command, timeout=_TIMEOUT, place=place, env=dated)
        part.replace(archive)
    finally:
        part.unlink(missing_ok=True)
    return archive


def _check_emulation(recipe: Recipe, name: str) -> None:
    try:
        works = run_program(["arch-test", name], timeout=_TEST_SECONDS, check=False).returncode == 0
    except VMJobsError:  # it is not installed
        works = False
    if not works:
        raise BuildError(
            f"{recipe.name} is for {recipe.architecture}, and this host cannot run its programs",
            hint="apt-get install arch-test binfmt-support qemu-user-static; docs/recipes.md has more",
        )


def sources(recipe: Recipe, repository: SiteRepository | None = None) -> list[str]:
    """Package sources, as in sources.list; empty: mmdebstrap's defaults."""
    options = ["check-valid-until=no"] if recipe.allow_expired_archive else []
    if repository is None and not options:
        return []
    lines = [_source(options, f"{_MIRROR} {recipe.suite} main")]
    if repository is not None:
        _, _, rest = repository.line.partition(" ")
        lines.append(_source([*options, f"signed-by={repository.key.resolve()}"], rest))
    return lines


def _source(options: Sequence[str], rest: str) -> str:
    return f"deb [{' '.join(options)}] {rest}" if options else f"deb {rest}"


def kernel_package(tree: FileTree) -> FileNode:
    """The kernel's .deb that the hook downloaded.

    Raises:
        BuildError: there is none.
    """
    for path, node in tree.walk():
        if path.startswith(f"{KERNEL_FOLDER}/") and path.endswith(".deb"):
            return node
    raise BuildError("mmdebstrap left no kernel package")


def clean(tree: FileTree, recipe: Recipe) -> None:
    """Remove from ``tree`` all that differs between builds or that no job needs."""
    patterns = (*DROPPED, *(pattern.strip("/") for pattern in recipe.drop))
    tree.remove(lambda path, _node: not any(fnmatch.fnmatchcase(path, p) for p in patterns))
    tree.nodes[""] = FileNode(stat.S_IFDIR | 0o755)
    for path in ("dev", "proc", "sys", "run", "job", "root", "tmp", "var/tmp", "var/log", "var/cache"):
        tree.add_dir(path, 0o1777 if path.endswith("tmp") else 0o755)
    for path, node in list(tree.nodes.items()):
        if path.endswith(".pyc"):
            _pin_bytecode(tree, path, node)


def _pin_bytecode(tree: FileTree, path: str, node: FileNode) -> None:
    """Make byte code valid for any time stamp of its source.

    Under SOURCE_DATE_EPOCH Debian's packages compile to files that contain a hash of the source, which
    Python checks at each import. This switches the check off, since the sources do not change. Byte
    code with a time stamp would be stale: it is removed.
    """
    data = node.content.read()
    flags = struct.unpack_from("<I", data, 4)[0] if len(data) >= 16 else 0
    if not flags & 1:
        del tree.nodes[path]
        return
    pinned = data[:4] + struct.pack("<I", 1) + data[8:]
    tree.nodes[path] = FileNode(node.mode, node.uid, node.gid, in_memory(pinned))
