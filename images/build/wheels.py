"""Install Python wheels into an image: fetch and unpack them, never execute them."""

from __future__ import annotations

import hashlib
import lzma
import stat
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Final

from images.build.process import run
from images.build.scratch_dir import ScratchDir
from images.build.tree import FileNode, FileTree, check_destination, in_memory
from images.recipe import PythonPart, Wheel
from vmjobs.errors import BuildError, DigestMismatch

_TIMEOUT: Final = 900.0
#: The largest unpacked size of a wheel in bytes: its files are in memory until the disk is written.
MAX_UNPACKED: Final = 2 * 1024**3
#: All compatible ones: for pip none implies another. Debian 12 has glibc 2.36.
_PLATFORMS: Final = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")

#: Exceptions for a zip archive that is damaged, encrypted or too new.
_ZIP_ERRORS: Final = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


def fetch(part: PythonPart, wheel: Wheel, folder: Path, place: ScratchDir) -> Path:
    """Download the wheel to ``folder`` unless it exists, and check the hash in the recipe.

    Raises:
        BuildError: pip cannot download it. DigestMismatch: it has another hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{wheel.name.replace('-', '_')}-{wheel.version}-"
    for file in sorted(folder.glob(f"{stem}*.whl")):
        if _sha256(file) == wheel.sha256:
            return file
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--only-binary=:all:"]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    command += ["--python-version", part.version, "--dest", str(folder)]
    run([*command, f"{wheel.name}=={wheel.version}"], timeout=_TIMEOUT, place=place)
    found = sorted(folder.glob(f"{stem}*.whl"))
    for file in found:
        if _sha256(file) == wheel.sha256:
            return file
    if not found:
        raise BuildError(f"pip downloaded no file {stem}*.whl")
    raise DigestMismatch(
        f"{found[0].name} has sha256 {_sha256(found[0])}, the recipe pins {wheel.sha256}"
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def install(tree: FileTree, file: Path, target: str) -> None:
    """Put a wheel's files into ``tree``, in the layout of ``pip install --target``.

    Raises:
        BuildError: the wheel cannot be read, is too large, or has a path outside its folder.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            size = sum(member.file_size for member in archive.infolist())
            if size > MAX_UNPACKED:
                limit = MAX_UNPACKED // 1024**2
                raise BuildError(f"{file.name} has {size // 1024**2} MiB; the limit is {limit} MiB")
            for member in archive.infolist():
                path = _destination(member.filename, target.strip("/"))
                if member.is_dir() or path is None:
                    continue
                executable = bool(member.external_attr >> 16 & 0o111)
                mode = stat.S_IFREG | (0o755 if executable else 0o644)
                with archive.open(member) as source:
                    data = source.read(member.file_size)  # ignore data beyond the declared size
                check_destination(tree, path)
                tree.add(path, FileNode(mode, content=in_memory(data)))
    except _ZIP_ERRORS as error:
        raise BuildError(f"cannot unpack {file.name}: {error}") from error


def _destination(name: str, target: str) -> str | None:
    parts = name.split("/")
    if name.startswith("/") or ".." in parts:
        raise BuildError(f"the wheel has a file outside its folder: {name}")
    if {"", "."} & set(parts[:-1]) or parts[-1] == ".":
        raise BuildError(f"the wheel has a file with an invalid name: {name}")
    if not parts[0].endswith(".data"):
        return f"{target}/{name}"
    if len(parts) < 3:
        return None
    kind, rest = parts[1], "/".join(parts[2:])
    if kind in {"purelib", "platlib", "data"}:
        return f"{target}/{rest}"
    return f"usr/local/bin/{rest}" if kind == "scripts" else None
