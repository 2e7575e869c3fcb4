"""Kernel and initial RAM disk for kvm and qemu, from Debian's kernel package.

This module and not initramfs-tools makes the RAM disk: a static busybox, one short script and the few
modules that find the root disk. It is smaller by an order of magnitude, and reproducible.
"""

from __future__ import annotations

import gzip
import io
import lzma
import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Final

from images.build import cpio
from images.build.bootstrap import kernel_package
from images.build.process import run
from images.build.scratch_dir import ScratchDir
from images.build.tree import FileTree
from vmjobs.errors import BuildError

_UNPACK_SECONDS: Final = 120
#: As busybox' modprobe finds it: the section ``.modinfo`` has a list of ``name=value``.
_DEPENDS: Final = re.compile(rb"\0depends=([^\0]*)\0")


@dataclass(frozen=True)
class KernelFiles:
    """The files of a kernel package that are used. modules: by name, with ``_`` for ``-``."""

    version: str
    image: bytes
    modules: dict[str, bytes]
    builtin: frozenset[str]


def boot_files(
    tree: FileTree, modules: Iterable[str], place: ScratchDir, *, epoch: int
) -> tuple[bytes, bytes]:
    """The kernel whose package is in ``tree``, and an initial RAM disk with these modules.

    Raises:
        BuildError: there is no such package or module, or no busybox.
    """
    package = place.folder / "kernel.deb"
    package.write_bytes(kernel_package(tree).content.read())
    files = _unpack(package, place)
    return files.image, _initrd(files, modules, tree.file("bin/busybox").read(), epoch=epoch)


def _unpack(package: Path, place: ScratchDir) -> KernelFiles:
    files = run(["dpkg-deb", "--fsys-tarfile", package], timeout=_UNPACK_SECONDS, place=place)
    image, version, builtin = b"", "", frozenset[str]()
    modules: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            reader = archive.extractfile(member) if member.isreg() else None
            if reader is None:
                continue
            if path.name.startswith("vmlinuz-"):
                image, version = reader.read(), path.name.removeprefix("vmlinuz-")
            elif path.name == "modules.builtin":
                builtin = frozenset(module_name(line) for line in reader.read().decode().split())
            elif ".ko" in path.suffixes:
                modules[module_name(path.name)] = reader.read()
    if not image:
        raise BuildError(f"{package} has no kernel")
    return KernelFiles(version, image, modules, builtin)


def module_name(path: str) -> str:
    """Name of the module in a file: ``kernel/crypto/crc32c-intel.ko.xz`` is ``crc32c_intel``."""
    return PurePosixPath(path).name.partition(".ko")[0].replace("-", "_")


def load_order(files: KernelFiles, wanted: Iterable[str]) -> list[tuple[str, bytes]]:
    """The wanted modules and their dependencies, which come first, uncompressed.

    Raises:
        BuildError: a module is neither in the package nor built in.
    """
    order: dict[str, bytes] = {}

    def visit(name: str, needed_by: str) -> None:
        name = name.replace("-", "_")
        if name in order or name in files.builtin:
            return
        if name not in files.modules:
            raise BuildError(f"kernel {files.version} has no module {name}, which {needed_by} needs")
        data = _plain(files.modules[name])
        for other in depends(data):
            visit(other, name)
        order[name] = data

    for name in wanted:
        visit(name, "the recipe")
    return list(order.items())


def _plain(data: bytes) -> bytes:
    if data.startswith(b"\xfd7zXZ"):
        return lzma.decompress(data)
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


def depends(module: bytes) -> list[str]:
    """The dependencies of an ELF module, from the list that every kernel build writes into it."""
    if module[:5] != b"\x7fELF\x02":
        raise BuildError("a kernel module is not a 64-bit ELF file")
    found = _DEPENDS.search(module)
    return [name for name in found[1].decode().split(",") if name] if found else []


def _initrd(files: KernelFiles, wanted: Iterable[str], busybox: bytes, *, epoch: int) -> bytes:
    """An initial RAM disk that mounts ``root=`` and hands over to the image's init.

    busybox: a static one. Left uncompressed: it is small, and unpacking costs more than reading.
    """
    tree = FileTree()
    script = resources.files("images.guest") / "initrd.sh"
    tree.add_file("init", script.read_bytes(), 0o755)
    tree.add_file("bin/busybox", busybox, 0o755)
    tree.add_link("bin/sh", "busybox")
    for folder in ("dev", "proc", "sys", "root"):
        tree.add_dir(folder)
    names = []
    for name, data in load_order(files, wanted):
        tree.add_file(f"modules/{name}.ko", data)
        names.append(name)
    tree.add_file("modules/order", "".join(f"{name}\n" for name in names).encode())
    return cpio.archive(tree, epoch=epoch)
