"""``vmjobs gateway backup`` and ``restore``."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import click
from pydantic import TypeAdapter, ValidationError

from node.cli.gateway.common import (
    connect_supervisor,
    default_directory,
    find_gateway,
    gateway_options,
    images,
    is_stopped,
    tag_image,
)
from vmjobs.agent.cluster_vms.persistent_disks import SCRATCH_DISK, root_overlay
from vmjobs.cli.common import echo
from vmjobs.cli.progress import byte_bars
from vmjobs.cluster.spec import ClusterName
from vmjobs.errors import Conflict, DigestMismatch, InvalidRequest, Unavailable
from vmjobs.file_lock import file_lock
from vmjobs.fsync import sync_directory
from vmjobs.gateway.archive import (
    RESERVED_BYTES,
    ArchiveFile,
    ArchiveWriter,
    Extents,
    parse_extents,
    read_archive,
    read_extents,
    replace_file,
    take_snapshot,
    write_disk,
)
from vmjobs.gateway.directory import GatewayDirectory, InstalledGateway
from vmjobs.model import MIB

_HEADER_ENTRY = "gateway.json"
_ROOT_ENTRY = "root.overlay"
_SECRET = re.compile(r"secrets/([A-Za-z0-9][A-Za-z0-9._-]{0,249})")
_DISK = re.compile(
    rf"machines/([a-z0-9-]+)/({re.escape(_ROOT_ENTRY)}|{re.escape(SCRATCH_DISK)})\.(map|data)"
)
_MANIFEST = re.compile(r"images/([0-9a-f]{64})\.json")
_CONTENT_PART = re.compile(r"contents/([0-9a-f]{64})\.(map|data)")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@gateway_options
@click.option(
    "--no-images", is_flag=True, help="Leave out the images: they must exist where it is restored."
)
def backup(file: Path, name: str | None, state_dir: Path | None, no_images: bool) -> None:
    """Copy the whole gateway into FILE: disks, keys, images, and the declaration.

    Its VMs may run: the data of their services is frozen, and all VMs are paused while snapshots
    of their disks are taken. FILE appears once it is complete. It has the gateway's keys, so keep
    it safe.
    """
    place = find_gateway(name, state_dir)
    installed = place.installed()
    disks = {
        f"machines/{vm}/{entry}": _disk_path(place, installed, vm, entry)
        for vm in installed.images
        for entry in (_ROOT_ENTRY, SCRATCH_DISK)
    }
    _check_present(disks.values())
    parts = {} if no_images else _image_parts(installed)
    size = sum(map(_data_bytes, disks.values()))
    total = size + sum(map(_data_bytes, parts.values()))
    frozen: list[str] = []
    with ExitStack() as snapshots, replace_file(file) as sink, byte_bars() as shown:
        task = shown.add_task("copying", total=total)
        archive = ArchiveWriter(sink, lambda done: shown.advance(task, done))
        archive.add(_HEADER_ENTRY, installed.model_dump_json(by_alias=True).encode())
        for secret, data in place.secrets().items():
            archive.add(f"secrets/{secret}", data)
        if not no_images:
            store = images()
            for digest in sorted(set(installed.images.values())):
                manifest = store.manifest(digest).canonical()
                archive.add(f"images/{digest.removeprefix('sha256:')}.json", manifest)
        for entry, path in parts.items():
            with path.open("rb") as part:
                archive.add_disk(entry, part)
        taken: dict[str, BinaryIO] = {}
        begin = time.monotonic()
        with _freeze_disks(place) as frozen:
            if place.installed().images != installed.images:
                raise Conflict("a VM was upgraded meanwhile", hint="back up again")
            _check_present(disks.values())
            for entry, path in disks.items():
                if not path.exists():
                    continue  # a VM that has not booted has no root disk
                # The archive may be on the same file system.
                if snapshot := take_snapshot(path, RESERVED_BYTES + size):
                    taken[entry] = snapshots.enter_context(snapshot)
                    continue
                with path.open("rb") as disk:
                    archive.add_disk(entry, disk)
        seconds = time.monotonic() - begin
        for entry, snapshot in taken.items():
            archive.add_disk(entry, snapshot)
            snapshot.close()
        archive.finish()
    sync_directory(file.absolute().parent)
    how = f"frozen for {seconds:.1f} s: {', '.join(frozen)}" if frozen else "none was frozen"
    vms = f"{len(installed.images)} VMs ({how})"
    echo(f"{file}: {installed.gateway.name}, {vms}, {file.stat().st_size / MIB:.0f} MiB")


def _check_present(disks: Iterable[Path]) -> None:
    for path in disks:
        if path.name == SCRATCH_DISK and not path.exists():
            raise Conflict(f"{path} is missing", hint="is its file system mounted?")


def _data_bytes(path: Path) -> int:
    """Bytes of a disk's data; 0 if there is no disk."""
    try:
        with path.open("rb") as file:
            return read_extents(file).data
    except FileNotFoundError:
        return 0


def _disk_path(place: GatewayDirectory, installed: InstalledGateway, vm: str, entry: str) -> Path:
    disks = place.disks(vm)
    return root_overlay(disks, installed.images[vm]) if entry == _ROOT_ENTRY else disks / entry


def _image_parts(installed: InstalledGateway) -> dict[str, Path]:
    """Return the contents of all images, each once, by their names in a backup."""
    store = images()
    parts = {p.digest for d in installed.images.values() for p in store.manifest(d).parts()}
    return {f"contents/{p.removeprefix('tree:')}": store.folder.verify(p) for p in sorted(parts)}


@contextmanager
def _freeze_disks(place: GatewayDirectory) -> Iterator[list[str]]:
    """Prevent changes of the gateway's disks; yield the VMs whose data is frozen.

    Raises:
        Conflict: a disk may have changed.
    """
    if is_stopped(place):
        try:
            with place.lock_supervisor():
                yield []
                return
        except Conflict:  # a supervisor runs that has no VM, or none yet
            pass
    with connect_supervisor(place) as control:
        before = control.ask("freeze")
        unfrozen = [name for name in before["paused"] if name not in before["frozen"]]
        if unfrozen:
            echo(
                f"{', '.join(unfrozen)}: did not freeze its data; the copy is as after a power cut",
                err=True,
            )
        yield [str(name) for name in before["frozen"]]
        try:
            after = control.ask("thaw")
        except Unavailable as error:
            raise Conflict(
                "the supervisor ended while disks were copied; they may have changed",
                hint="vmjobs gateway boot, then back up again",
            ) from error
    if after["faults"]:
        echo(f"not every VM was resumed: {'; '.join(after['faults'])}", err=True)
    if before["incarnations"] != after["incarnations"]:
        raise Conflict("a VM started while its disks were copied", hint="back up again")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--name", metavar="NAME", help="The gateway's name here.")
@click.option("--state-dir", type=click.Path(path_type=Path, file_okay=False), help="Where to keep it.")
def restore(file: Path, name: str | None, state_dir: Path | None) -> None:
    """Restore the gateway in FILE, stopped. An existing gateway is never touched.

    Every byte is verified before the gateway appears under its name.
    """
    if name is not None:
        _check_name(name)
    with byte_bars() as shown, shown.open(file, "rb", description="copying") as source:
        entries = read_archive(source)
        installed = _read_installed(next(entries, None), name)
        place = state_dir or default_directory() / installed.gateway.name
        with _restore_directory(place.absolute()) as folder:
            restored = _RestoredGateway(folder, installed)
            for content in entries:
                restored.add_entry(content)
            restored.finish()
    echo(f"{installed.gateway.name} is restored in {place}; vmjobs gateway boot")


def _check_name(name: str) -> None:
    try:
        TypeAdapter(ClusterName).validate_python(name)
    except ValidationError as error:
        raise InvalidRequest(f"{name!r} cannot be a gateway's name") from error


def _read_installed(first: ArchiveFile | None, name: str | None) -> InstalledGateway:
    if first is None or first.name != _HEADER_ENTRY:
        raise InvalidRequest("the file is not a backup of a gateway")
    try:
        found = InstalledGateway.model_validate_json(first.read_small())
    except ValidationError as error:
        raise InvalidRequest("the backup's gateway.json cannot be read") from error
    known = {vm.name for vm in found.gateway.machines}
    if not found.images.keys() <= known:
        raise InvalidRequest("the backup's gateway.json contradicts itself")
    # Its places are those of another host, and the original may serve metrics.
    vms = tuple(vm.model_copy(update={"place": None}) for vm in found.gateway.machines)
    named = {"name": name or found.gateway.name, "machines": vms, "metrics": None}
    gateway = found.gateway.model_copy(update=named)
    return found.model_copy(update={"gateway": gateway})


@contextmanager
def _restore_directory(place: Path) -> Iterator[Path]:
    """Yield a temporary directory; rename it to ``place`` once it is complete.

    Raises:
        Conflict: ``place`` exists.
    """
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = place.with_name(f".{place.name}.restoring")
    taken = Conflict(f"{place} is being restored already")
    with file_lock(place.with_name(f".{place.name}.lock"), taken):
        if place.exists():
            raise Conflict(f"{place} exists already", hint="--name NAME gives it another name")
        if folder.exists():  # of a restore that was killed
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        try:
            yield folder
            folder.rename(place)
            sync_directory(place.parent)
        except OSError as error:
            raise Conflict(f"{place} cannot be restored: {error.strerror}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _RestoredGateway:
    """The entries of a backup restored so far, in a temporary directory."""

    folder: Path
    installed: InstalledGateway
    _map: tuple[str, Extents] | None = None
    _manifests: dict[str, bytes] = field(default_factory=dict)
    _disks: list[tuple[str, str]] = field(default_factory=list)

    def add_entry(self, content: ArchiveFile) -> None:
        """Store an entry of the backup; refuse unexpected names."""
        name = content.name
        if found := _SECRET.fullmatch(name):
            self._place.save_secrets({found[1]: content.read_small()})
        elif found := _MANIFEST.fullmatch(name):
            self._manifests[f"sha256:{found[1]}"] = content.read_small()
        elif found := _CONTENT_PART.fullmatch(name):
            self._add_half(content, found[2], f"content-{found[1]}")
        elif (found := _DISK.fullmatch(name)) and found[1] in self.installed.images:
            self._add_half(content, found[3], f"disk-{found[1]}-{found[2]}")
            if found[3] == "data":
                self._disks.append((found[1], found[2]))
        else:
            raise InvalidRequest(f"the backup has {name!r}, which is not part of a gateway")

    def finish(self) -> None:
        """Move images into the store and disks to their VMs, after verification."""
        self._keep_images()
        for vm in self.installed.gateway.machines:
            if vm.name in self.installed.images:
                self._place.prepare(self.installed, vm)
        for name, disk in self._disks:
            target = _disk_path(self._place, self.installed, name, disk)
            (self.folder / f"disk-{name}-{disk}").replace(target)
        self._place.save(self.installed)

    @property
    def _place(self) -> GatewayDirectory:
        return GatewayDirectory(self.folder)

    def _add_half(self, content: ArchiveFile, half: str, target: str) -> None:
        stem = content.name.rpartition(".")[0]
        if half == "map":
            self._map = (stem, parse_extents(content))
        elif self._map is None or self._map[0] != stem:
            raise InvalidRequest(f"{content.name} in the backup has no map")
        else:
            write_disk(content, self._map[1], self.folder / target)

    def _keep_images(self) -> None:
        from images.manifest import ImageManifest  # noqa: PLC0415

        store = images()
        for path in sorted(self.folder.glob("content-*")):
            digest = f"tree:{path.name.removeprefix('content-')}"
            if not store.folder.has(digest) and (made := store.folder.add_file(path).digest) != digest:
                raise DigestMismatch(f"the backup is damaged: {digest} in it is {made}")
            path.unlink()
        for digest, data in self._manifests.items():
            store.put_manifest(ImageManifest.parse(data, digest))
        for vm, digest in self.installed.images.items():
            store.manifest(digest)  # raises if the image is missing
            tag_image(self.installed, vm)
