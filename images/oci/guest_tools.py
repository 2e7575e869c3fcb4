"""Files added to every container image: kernel, initial RAM disk, guest program, tools.

All of them come from the packages of the recipe ``generic`` and are kept between imports. In the image
the tools are below ``/.vmjobs``, with the libraries they were built for, since a container may have
others or none.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from images import recipe as recipes
from images.build import bootstrap, kernel
from images.build.builder import GUEST_PROGRAMS, StepProgress, add_dev_entries, guest_program
from images.build.scratch_dir import ScratchDir, scratch_dir
from images.build.tree import FileTree, from_tar
from images.store.files import exclusive_lock
from vmjobs.errors import BuildError

RECIPE: Final = "generic"
FOLDER: Final = ".vmjobs"
INIT: Final = f"/{FOLDER}/init"
#: Increased whenever other files are taken from the same packages.
_VERSION: Final = 2
_LIBRARIES: Final = "usr/lib/x86_64-linux-gnu"
#: Paths in the packages, by paths in the image.
_TOOLS: Final = {
    "busybox": "bin/busybox",
    "bin/dd": "bin/dd",
    "bin/e2fsck": "usr/sbin/e2fsck",
    "bin/env": "usr/bin/env",
    "bin/mke2fs": "usr/sbin/mke2fs",
    "bin/setpriv": "usr/bin/setpriv",
    "lib/ld.so": f"{_LIBRARIES}/ld-linux-x86-64.so.2",
    **{
        f"lib/{name}": f"{_LIBRARIES}/{name}"
        for name in (
            "libblkid.so.1",
            "libc.so.6",
            "libcap-ng.so.0",
            "libcom_err.so.2",
            "libe2p.so.2",
            "libext2fs.so.2",
            "libuuid.so.1",
        )
    },
}


@dataclass(frozen=True)
class GuestTools:
    """The files, on this host. folder: has a ``kernel`` for KVM and QEMU, ``initrd``, ``tools/``."""

    folder: Path
    cmdline: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Digest of all files that it adds to an image."""
        text = hashlib.sha256()
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                text.update(f"{path.relative_to(self.folder)} {digest}\n".encode())
        for name, data in _programs().items():
            text.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
        return text.hexdigest()

    def install(self, tree: FileTree) -> None:
        """Put the guest program and its tools into ``tree``, replacing other files there."""
        tree.remove(lambda path, _: path != FOLDER and not path.startswith(f"{FOLDER}/"))
        for name in _TOOLS:
            data = (self.folder / "tools" / name).read_bytes()
            tree.add_file(f"{FOLDER}/{name}", data, 0o755)
        executable = {"init", *GUEST_PROGRAMS}
        for name, data in _programs().items():
            tree.add_file(f"{FOLDER}/{name}", data, 0o755 if name in executable else 0o644)
        add_dev_entries(tree, f"{FOLDER}/dev")
        for name in ("run", "job"):
            tree.add_dir(f"{FOLDER}/{name}")


def prepare(workdir: Path, report_step: StepProgress) -> GuestTools:
    """Make the files in ``workdir``; existing ones are reused.

    Raises:
        BuildError: the packages cannot be fetched, or lack a file.
    """
    recipe = recipes.load(RECIPE)
    if recipe.kernel is None:
        raise BuildError(f"the recipe {RECIPE} has no kernel")
    initrd_script = guest_program()["initrd.sh"]
    inputs = f"{_VERSION} {recipe.digest} {hashlib.sha256(initrd_script).hexdigest()} {sorted(_TOOLS)}"
    folder = workdir / "containers" / hashlib.sha256(inputs.encode()).hexdigest()[:16]
    kit = GuestTools(folder, tuple(w for w in recipe.cmdline if not w.startswith("init=")))
    with exclusive_lock(workdir / "containers" / "lock"):
        if folder.is_dir():
            return kit
        report_step("fetch kernel and tools", 0.0)
        with scratch_dir(workdir) as place:
            tree = from_tar(bootstrap.bootstrap(recipe, workdir / "packages", place))
            made = place.folder / "kit"
            _write_tools(made, tree, recipe.kernel.modules, recipe.epoch, place)
            made.rename(folder)
    return kit


def _write_tools(
    folder: Path, tree: FileTree, modules: tuple[str, ...], epoch: int, place: ScratchDir
) -> None:
    folder.mkdir()
    image, ramdisk = kernel.boot_files(tree, modules, place, epoch=epoch)
    (folder / "kernel").write_bytes(image)
    (folder / "initrd").write_bytes(ramdisk)
    for name, path in _TOOLS.items():
        target = folder / "tools" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(tree.file(path).read())


def _programs() -> dict[str, bytes]:
    """The guest program's files, by their names in the image."""
    found = {name: data for name, data in guest_program().items() if name != "initrd.sh"}
    found.pop("launch.sh")
    _, _, body = found.pop("init.sh").partition(b"\n")
    found["init"] = f"#!/{FOLDER}/busybox sh\n".encode() + body
    folder = resources.files("images.oci.guest")
    for name in ("container.sh", "enter.sh"):
        found[name] = (folder / name).read_bytes()
    return found
