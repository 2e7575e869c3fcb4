"""Build an image from a recipe, into a store.

The same recipe, packages and guest program give the same image digest, on any host, with or
without root: see :mod:`images.build.ext4` and :mod:`images.build.bootstrap`.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import re
import shlex
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Final

from images import recipe as recipes
from images.build import bootstrap, ext4, kernel, wheels
from images.build.bootstrap import SiteRepository
from images.build.packages import package_versions
from images.build.scratch_dir import CancelCheck, ScratchDir, never_cancelled, scratch_dir
from images.build.tree import FileTree, check_destination, from_tar
from images.manifest import GuestSupport, ImageManifest, Part
from images.recipe import Recipe
from images.store.files import exclusive_lock
from images.store.image_store import ImageEntry, ImageStore
from vmjobs.errors import BuildError, InvalidRequest
from vmjobs.model import MIB

log = logging.getLogger(__name__)

#: Called with the name of the step and the fraction of the work that is done, 0 to 1.
StepProgress = Callable[[str, float], None]

#: Boots an image, given by its digest, and runs the recipe's probes in it. Raises BuildError, and the
#: errors of the scratch directory's ``check_cancelled``.
BootTest = Callable[[str, Recipe, ScratchDir], None]

#: Increased whenever the builder makes different bytes from the same inputs.
_BUILDER_VERSION: Final = 4
_GUEST_FOLDER: Final = "usr/lib/vmjobs"
_INIT: Final = "sbin/vmjobs-init"
#: Compiled parts of the guest program.
GUEST_PROGRAMS: Final = ("talk", "unpack")
#: The module with which a kernel finds its disks on Xen.
_XEN_DISK: Final = "xen_blkfront"
#: Links that devtmpfs lacks and the guest program adds; ``None`` for directories.
_DEV: Final = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "pts": None,
    "shm": None,
}
_HOSTS: Final = b"127.0.0.1\tlocalhost\n::1\tlocalhost\n"


def build(
    recipe: Recipe | str,
    store: ImageStore,
    workdir: Path,
    progress: StepProgress | None = None,
    force: bool = False,
    boot_test: BootTest | None = None,
    repository: SiteRepository | None = None,
    named: bool = True,
    check_cancelled: CancelCheck = never_cancelled,
) -> ImageEntry:
    """Build an image into ``store``; if ``named``, tag it ``latest`` and with the recipe's version.

    An image that was built from the same recipe and guest program is reused, unless ``force``, which
    also fetches the packages again. Downloads stay in ``workdir``. With a ``boot_test`` an image that
    fails it gets no name; one that has passed it is not tested again.

    recipe: composed, or its name or path. check_cancelled: called every second or so, perhaps by
    another thread; if it raises, the build ends.

    Raises:
        NotFound: there is no such recipe. InvalidRequest: it has faults, or needs a ``repository``.
        BuildError: a package, a wheel or a tool is missing, or the image failed its boot test.
        DigestMismatch: a wheel has another hash than the recipe pins.
    """
    if isinstance(recipe, str):
        recipe = recipes.load(recipe)
    if recipe.needs_repository and repository is None:
        raise InvalidRequest(
            f"the recipe {recipe.name} needs packages that only a site's own repository has",
            hint="name it with --repository and --repository-key",
        )
    guest = guest_program(recipe.architecture or "")
    key = build_key(recipe, guest, repository)
    report_step: StepProgress = progress or (lambda _step, _fraction: None)
    with exclusive_lock(store.root / "locks" / f"build-{key}", check_cancelled):
        digest = None if force else store.built(key)
        if digest is None:
            archive = bootstrap.archive_path(recipe, workdir / "packages", repository)
            with (
                exclusive_lock(bootstrap.archive_lock(archive), check_cancelled),
                scratch_dir(workdir, check_cancelled) as place,
            ):
                digest = _build(recipe, guest, store, workdir, place, report_step, force, repository)
            store.record_build(key, digest)
        tested = _boot_test_key(key, digest, recipe)
        if boot_test is not None and store.built(tested) is None:
            report_step("boot test", 0.95)
            with scratch_dir(workdir, check_cancelled) as place:
                boot_test(digest, recipe, place)
            store.record_build(tested, digest)
        for tag in (recipe.version, "latest") if named else ():
            store.tag(recipe.name, tag, digest)
    report_step("done", 1.0)
    manifest = store.manifest(digest)
    return ImageEntry(recipe.name, "latest", digest, manifest.size, manifest.architecture)


def _boot_test_key(key: str, digest: str, recipe: Recipe) -> str:
    """The key that records a passed boot test: a digest of the image and its probes."""
    text = hashlib.sha256(f"{key} {digest} boots\n".encode())
    for probe in recipe.probes:
        text.update(hashlib.sha256(probe.encode("utf-8", "surrogatepass")).digest())
    return text.hexdigest()


def guest_program(architecture: str = "") -> dict[str, bytes]:
    """The guest program's files by name, from ``images/guest``. architecture: default: the host's."""
    suffix = "" if architecture in {"", platform.machine()} else f"-{architecture}"
    folder = resources.files("images.guest")
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".sh"))
    scripts = {name: (folder / name).read_bytes() for name in files}
    try:
        return scripts | {name: (folder / f"{name}{suffix}").read_bytes() for name in GUEST_PROGRAMS}
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        raise BuildError(
            f"a part of the guest program is missing: {missing}",
            hint="`make setup` compiles it, `make architectures` those for other architectures",
        ) from error


def build_key(recipe: Recipe, guest: dict[str, bytes], repository: SiteRepository | None = None) -> str:
    """A digest of a build's inputs, except the contents of the package archive."""
    site = repository.line if repository else ""
    text = hashlib.sha256(f"{_BUILDER_VERSION} {recipe.digest} {site}\n".encode())
    for name, data in sorted(guest.items()):
        text.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
    return text.hexdigest()


def _build(
    recipe: Recipe,
    guest: dict[str, bytes],
    store: ImageStore,
    workdir: Path,
    place: ScratchDir,
    report_step: StepProgress,
    force: bool,
    repository: SiteRepository | None,
) -> str:
    report_step("install packages", 0.0)
    packages_dir = workdir / "packages"
    archive = bootstrap.bootstrap(recipe, packages_dir, place, force=force, repository=repository)
    report_step("read packages", 0.6)
    tree = from_tar(archive)
    packages = package_versions(tree)
    image = ramdisk = b""
    if recipe.kernel is not None:
        report_step("unpack kernel", 0.65)
        image, ramdisk = kernel.boot_files(tree, recipe.kernel.modules, place, epoch=recipe.epoch)
    bootstrap.clean(tree, recipe)
    if recipe.python:
        for wheel in recipe.python.wheels:
            report_step(f"fetch {wheel.name}", 0.75)
            file = wheels.fetch(recipe.python, wheel, workdir / "wheels", place)
            wheels.install(tree, file, recipe.python.target)
            packages[f"python:{wheel.name}"] = wheel.version
    add_guest(tree, recipe, guest)
    report_step("write root disk", 0.85)
    root = _store_root(tree, recipe, store, place)
    manifest = ImageManifest(
        architecture=recipe.architecture or platform.machine(),
        root=root,
        kernel=store.folder.put(image) if image else None,
        initrd=store.folder.put(ramdisk) if ramdisk else None,
        cmdline=recipe.cmdline,
        guest=GuestSupport(contract=3),
        xen=recipe.kernel is not None and _XEN_DISK in recipe.kernel.modules,
        recipe=recipe.digest,
        packages=packages,
    )
    log.info("built %s %s from %d packages", recipe.name, manifest.digest, len(packages))
    return store.put_manifest(manifest)


_BUSYBOX_VERSION: Final = re.compile(rb"BusyBox v1\.(\d+)\.")
_LAST_USABLE_BUSYBOX: Final = 37


def add_guest(tree: FileTree, recipe: Recipe, guest: dict[str, bytes]) -> None:
    """Put the guest program, the recipe's files and its environment for jobs into ``tree``."""
    for name, data in guest.items():
        if name == "init.sh":
            tree.add_file(_INIT, _with_shell(tree, data), 0o755)
        elif name != "initrd.sh":
            mode = 0o755 if name in GUEST_PROGRAMS else 0o644
            tree.add_file(f"{_GUEST_FOLDER}/{name}", data, mode)
    add_dev_entries(tree, f"{_GUEST_FOLDER}/dev")
    lines = (
        f"export {name}={shlex.quote(value)}\n" for name, value in sorted(recipe.environment.items())
    )
    tree.add_file("etc/vmjobs/environment", "".join(lines).encode())
    tree.add_file("etc/hosts", _HOSTS)
    for file in recipe.files:
        check_destination(tree, file.path)
        tree.add_file(file.path.strip("/"), file.text.encode(), 0o755 if file.executable else 0o644)


def _with_shell(tree: FileTree, script: bytes) -> bytes:
    """A script to be run by busybox's shell if there is one, whose tools cost a VM half as much.

    Not by that of 1.38: its ``read`` returns no more once a signal has arrived.
    """
    if tree.resolve_parent("bin/busybox") not in tree.nodes:
        return script
    version = _BUSYBOX_VERSION.search(tree.file("bin/busybox").read())
    if version is None or int(version[1]) > _LAST_USABLE_BUSYBOX:
        return script
    return b"#!/bin/busybox sh\n" + script.partition(b"\n")[2]


def add_dev_entries(tree: FileTree, folder: str) -> None:
    """Put what the guest program adds to a fresh /dev into ``folder`` of ``tree``."""
    for name, target in _DEV.items():
        if target is None:
            tree.add_dir(f"{folder}/{name}")
        else:
            tree.add_link(f"{folder}/{name}", target)


def _store_root(tree: FileTree, recipe: Recipe, store: ImageStore, place: ScratchDir) -> Part:
    file = place.folder / "root.img"
    ext4.write(
        tree,
        file,
        slack=recipe.slack * MIB,
        epoch=recipe.epoch,
        seed=recipe.digest.encode(),
        label=recipe.name,
    )
    place.check_cancelled()
    return store.folder.add_file(file)
