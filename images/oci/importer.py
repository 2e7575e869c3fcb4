"""Make a VM image in a store from a container image."""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from images.build import ext4
from images.build.builder import StepProgress
from images.build.packages import package_versions
from images.build.scratch_dir import locked_dir
from images.build.tree import FileNode, FileTree
from images.manifest import GuestSupport, ImageManifest, Program
from images.oci import guest_tools as kits
from images.oci.changeset import apply_layer
from images.oci.container import ContainerImage, program_of
from images.oci.fetch import ContainerFetcher, RegistryAccess
from images.oci.layers import UnpackBudget, unpack
from images.oci.reference import ContainerReference, parse
from images.oci.users import ContainerUser, look_up_user
from images.store.files import exclusive_lock
from images.store.image_store import ImageEntry, ImageStore
from vmjobs.errors import BuildError, ImageRejected
from vmjobs.model import MIB, NODE_ARCHITECTURE

log = logging.getLogger(__name__)

#: Increased whenever the importer makes different bytes from the same container image.
_VERSION: Final = 2
#: Free space on the root disk, in bytes, for programs that write to paths chosen when they were built.
#: It is a hole in the disk's file and costs nothing until it is used.
_SLACK: Final = 512 * MIB
_EPOCH: Final = 1735689600  # 2025-01-01, for nodes without a time
_HOSTS: Final = b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"


@dataclass(frozen=True)
class ImportedImage(ImageEntry):
    """An imported image. source: the container image's reference, with its digest."""

    source: str = ""


def import_reference(
    reference: str,
    store: ImageStore,
    workdir: Path,
    progress: StepProgress | None = None,
    *,
    access: RegistryAccess | None = None,
    name: str = "",
    tag: str = "",
) -> ImportedImage:
    """Make a VM image from a container image, in ``store``, and tag it.

    The same container image gives the same VM image. One that was imported before is not fetched
    again, only its tag is resolved again. name, tag: of the VM image; by default from the reference.

    Raises:
        InvalidRequest: ``reference`` is invalid. NotFound: there is no such image.
        Unauthenticated: not with these credentials. Unavailable: the registry does not answer.
        ImageRejected: it is for another architecture, or has faults. DigestMismatch: it is damaged.
        BuildError: a tool or the kernel is missing. StorageFull: there is no space to unpack it.
    """
    parsed = parse(reference)
    report_step: StepProgress = progress or (lambda _step, _fraction: None)
    workdir.mkdir(parents=True, exist_ok=True)
    with locked_dir(workdir, "container-", workdir / "containers" / "sweep") as folder:
        report_step("ask for the image", 0.0)
        fetcher = ContainerFetcher(parsed, access or RegistryAccess(), folder)
        asked = fetcher.resolve()
        kit = kits.prepare(workdir, report_step)
        inputs = f"{_VERSION} {asked} {kit.digest} {NODE_ARCHITECTURE}"
        key = hashlib.sha256(inputs.encode()).hexdigest()
        with exclusive_lock(store.root / "locks" / f"import-{key}"):
            digest = store.built(key)
            if digest is None:
                digest = _import(fetcher, parsed, kit, store, folder, report_step)
                store.record_build(key, digest)
    manifest = store.manifest(digest)
    own_name, own_tag = parsed.suggested_name
    entry = ImportedImage(
        name or own_name,
        tag or ("latest" if name else own_tag),
        digest,
        manifest.size,
        manifest.architecture,
        parsed.text if parsed.digest else f"{parsed.text}@{asked}",
    )
    store.tag(entry.name, entry.tag, digest)
    report_step("done", 1.0)
    return entry


def _import(
    fetcher: ContainerFetcher,
    reference: ContainerReference,
    kit: kits.GuestTools,
    store: ImageStore,
    folder: Path,
    report_step: StepProgress,
) -> str:
    report_step("fetch layers", 0.1)
    container = fetcher.copy()
    program, dropped = program_of(container.configuration)
    for variable in dropped:
        log.warning("%s: no shell can set the variable %r: left out", reference.text, variable)
    tree = _merge_layers(container, fetcher, folder, report_step)
    identity = look_up_user(tree, program.user)
    found = package_versions(tree)
    _add_vm_files(tree, kit, program, identity)
    report_step("write root disk", 0.8)
    seed = " ".join(layer.digest for layer in container.layers).encode()
    disk = folder / "root.img"
    try:
        ext4.write(tree, disk, slack=_SLACK, epoch=_EPOCH, seed=seed, lost_and_found=False)
    except BuildError as error:
        raise ImageRejected(f"{reference.text} does not fit on a disk: {error}") from error
    report_step("store", 0.9)
    manifest = ImageManifest(
        root=store.folder.add_file(disk),
        kernel=store.folder.add_file(kit.folder / "kernel"),
        initrd=store.folder.add_file(kit.folder / "initrd"),
        cmdline=(f"init={kits.INIT}", *kit.cmdline),
        guest=GuestSupport(contract=3),
        xen=True,
        program=program,
        recipe=_recipe_digest(container),
        packages=found,
    )
    log.info("imported %s (%s) as %s", reference.text, container.digest, manifest.digest)
    return store.put_manifest(manifest)


def _recipe_digest(container: ContainerImage) -> str:
    text = json.dumps({"container": container.digest, "importer": _VERSION}, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _merge_layers(
    container: ContainerImage, fetcher: ContainerFetcher, folder: Path, report_step: StepProgress
) -> FileTree:
    """Merge all layers into a tree, which refers to their archives in ``folder``."""
    tree, budget = FileTree(), UnpackBudget()
    tree.nodes[""].mtime = 0
    pairs = zip(container.layers, container.configuration.rootfs.diff_ids, strict=True)
    for number, (layer, diff_id) in enumerate(pairs):
        report_step(
            f"layer {number + 1} of {len(container.layers)}", 0.4 + 0.4 * number / len(container.layers)
        )
        archive = folder / f"layer-{number}.tar"
        blob = fetcher.blob(layer.digest)
        unpack(blob, layer, diff_id, archive, budget)
        if layer.digest not in {later.digest for later in container.layers[number + 1 :]}:
            blob.unlink()
        apply_layer(tree, archive, budget)
    return tree


def _add_vm_files(
    tree: FileTree, kit: kits.GuestTools, program: Program, identity: ContainerUser
) -> None:
    """Add files that a VM needs and a container lacks."""
    for name in ("dev", "proc", "sys"):
        if name in tree.nodes and not tree.nodes[name].is_dir:
            del tree.nodes[name]  # a file system of the kernel is mounted here
        tree.add_dir(name)
    _make_directory(tree, "etc")
    tree.add_file("etc/hosts", _HOSTS)
    if "etc/mtab" not in tree.nodes:
        tree.add_link("etc/mtab", "/proc/mounts")  # as container engines do
    directory = program.directory.strip("/")
    if directory:
        _make_directory(tree, directory)
    kit.install(tree)
    tree.add_file(f"{kits.FOLDER}/program", _program_file(tree, program, identity))
    lines = (f"export {name}={shlex.quote(value)}\n" for name, value in program.environment.items())
    tree.add_file(f"{kits.FOLDER}/environment", "".join(lines).encode())


def _make_directory(tree: FileTree, path: str) -> None:
    """Make a directory at ``path``, following symbolic links, unless there is one.

    Raises:
        ImageRejected: there is another kind of file.
    """
    try:
        here = tree.resolve_parent(f"{path}/x").rpartition("/")[0]
    except BuildError as error:
        raise ImageRejected(str(error)) from error
    parts = here.split("/")
    for depth in range(1, len(parts) + 1):
        parent = "/".join(parts[:depth])
        node = tree.nodes.setdefault(parent, FileNode(stat.S_IFDIR | 0o755))
        if parent and not node.is_dir:
            raise ImageRejected(f"the container has a file where a directory must be: /{parent}")


def _program_file(tree: FileTree, program: Program, identity: ContainerUser) -> bytes:
    """The guest program's parameters for the container, as shell variables."""
    values = {
        "arguments": shlex.join(program.arguments),
        "command": shlex.join(program.command),
        "directory": program.directory,
        "uid": str(identity.uid),
        "gid": str(identity.gid),
        "groups": ",".join(map(str, identity.groups)),
        "home": identity.home,
        "temporary": " ".join(_empty_temporary_dirs(tree)),
    }
    return "".join(f"program_{k}={shlex.quote(v)}\n" for k, v in values.items()).encode()


def _empty_temporary_dirs(tree: FileTree) -> list[str]:
    """World-writable directories for temporary files that are empty."""
    found = []
    for path in ("tmp", "var/tmp"):
        node = tree.nodes.get(path)
        usual = (
            node is not None and node.mode == stat.S_IFDIR | 0o1777 and (node.uid, node.gid) == (0, 0)
        )
        if usual and not any(other.startswith(f"{path}/") for other in tree.nodes):
            found.append(f"/{path}")
    return found
