"""``vmjobs gateway validate`` and ``install``."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import click

from node.cli.gateway.common import (
    default_directory,
    images,
    is_stopped,
    role_kit,
    select_vms,
    tag_image,
    untag_image,
    vms_argument,
)
from vmjobs.agent.cluster_vms import persistent_disks
from vmjobs.agent.node import memory_mib
from vmjobs.cli.common import echo
from vmjobs.cli.manifests import GatewayManifest, ManifestFinding, raise_findings, read_gateway
from vmjobs.config import host_and_port
from vmjobs.errors import Conflict, Fault, InvalidRequest, InvalidSpec, NotFound
from vmjobs.gateway.directory import GatewayDirectory, InstalledGateway
from vmjobs.gateway.spec import GATEWAY_HYPERVISOR, Gateway, GatewayVm
from vmjobs.model import MIB, PublishedPort

file_argument = click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
place_option = click.option(
    "--state-dir", type=click.Path(path_type=Path, file_okay=False), help="Where it is kept."
)


def read_valid_gateway(file: str, place: Path | None) -> tuple[GatewayManifest, GatewayDirectory]:
    """Return the gateway that ``file`` declares, and its directory.

    Raises:
        InvalidSpec: with all faults, as FILE:LINE:COLUMN.
    """
    manifest, findings = read_gateway(file)
    raise_findings(findings)
    if manifest is None:
        raise InvalidSpec(f"{file} declares no gateway")
    kept = GatewayDirectory((place or default_directory() / manifest.spec.name).absolute())
    raise_findings(sorted(_host_findings(manifest, kept), key=lambda f: (f.place.line, f.place.column)))
    return manifest, kept


def _host_findings(manifest: GatewayManifest, place: GatewayDirectory) -> Iterator[ManifestFinding]:
    """Yield findings about declared values that this host cannot provide."""
    vms = manifest.spec.machines
    try:
        role_kit().secrets(manifest.spec)
    except InvalidSpec as error:
        yield from map(manifest.finding, error.faults)
    for vm in vms:
        if vm.hypervisor not in (None, GATEWAY_HYPERVISOR):
            message = f"only {GATEWAY_HYPERVISOR} has private networks"
            yield manifest.finding(Fault(f"machines.{vm.name}.hypervisor", "unsupported", message))
    yield from _excess_findings(manifest, vms, "memory", memory_mib(), "memory")
    place_faults = list(_place_faults(manifest.spec, place))
    yield from map(manifest.finding, place_faults)
    if not place_faults:
        yield from _room_findings(manifest, place)
    yield from map(manifest.finding, _shrinking_faults(manifest.spec, place))
    yield from map(manifest.finding, _port_faults(manifest.spec, place))


def _room_findings(manifest: GatewayManifest, place: GatewayDirectory) -> Iterator[ManifestFinding]:
    """Yield findings about disks that their file systems have no room for."""
    by_device: dict[int, list[GatewayVm]] = {}
    folders = {}
    for vm in manifest.spec.machines:
        folder = _existing_parent(Path(vm.place) if vm.place else place.directory)
        device = folder.stat().st_dev
        by_device.setdefault(device, []).append(vm)
        folders[device] = folder
    for device, here in by_device.items():
        room = shutil.disk_usage(folders[device]).free
        there = sum(f.stat().st_blocks * 512 for vm in here for f in place.disks(vm.name).glob("*"))
        where = f"room for disks at {here[0].place or place.directory}"
        yield from _excess_findings(manifest, here, "disk", (room + there) // MIB, where)


def _place_faults(spec: Gateway, place: GatewayDirectory) -> Iterator[Fault]:
    for vm in spec.machines:
        if vm.place is None:
            continue
        disks, field = place.disks(vm.name), f"machines.{vm.name}.place"
        if os.path.lexists(disks):
            actual = (disks.readlink() if disks.is_symlink() else disks).parent
            if os.path.realpath(actual) != os.path.realpath(vm.place):
                why = f"its disks are in {actual}, and do not move: remove this line"
                yield Fault(field, "moved", why)
        elif not Path(vm.place).is_dir() or not os.access(vm.place, os.W_OK | os.X_OK):
            yield Fault(field, "unavailable", f"{vm.place} is not a directory that you may write to")


def _shrinking_faults(spec: Gateway, place: GatewayDirectory) -> Iterator[Fault]:
    for vm in spec.machines:
        disk = place.disks(vm.name) / persistent_disks.SCRATCH_DISK
        present = disk.stat().st_size // MIB if disk.exists() else 0
        if vm.disk < present:
            why = f"the disk of {vm.name} has {present} MiB and cannot shrink; declare at least as much"
            yield Fault(f"machines.{vm.name}.disk", "shrinks", why)


def _port_faults(spec: Gateway, place: GatewayDirectory) -> Iterator[Fault]:
    ours: list[PublishedPort] = []
    if (place.directory / "control").exists() and not is_stopped(place):
        ours = [one for vm in place.installed().gateway.machines for one in vm.publish]
    if spec.metrics and spec.metrics != _installed_metrics(place):
        host, port = host_and_port(spec.metrics)
        if why := _why_no_server(host, port):
            yield Fault("metrics", "unavailable", why)
    for vm in spec.machines:
        for number, one in enumerate(vm.publish):
            if not any(one.overlaps(other) for other in ours) and (why := _why_unpublishable(one)):
                yield Fault(f"machines.{vm.name}.publish.{number}", "unavailable", why)


def _installed_metrics(place: GatewayDirectory) -> str | None:
    """The address at which a supervisor of this gateway may serve metrics now."""
    with suppress(NotFound):
        return place.installed().gateway.metrics
    return None


def _why_unpublishable(one: PublishedPort) -> str:
    """Return why a port of this host cannot be published; ``""``: it can."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    if one.port < lowest:  # even if root runs the gateway: networks of VMs need no privilege
        other = f"{one.port + 2000}:{one.vm_port}"
        return f"ports below {lowest} are for root; publish another one, such as '{other}'"
    return _why_no_server(str(one.address), one.port)


def _why_no_server(address: str, port: int) -> str:
    """Return why no program can listen there; ``""``: it can."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"another program uses the port {address}:{port} of this host"
            if error.errno == errno.EACCES:
                return f"the port {port} is for root; choose another one"
            return f"{address} is not an address of this host"
    return ""


def _excess_findings(
    manifest: GatewayManifest, vms: Sequence[GatewayVm], what: str, available: int, where: str
) -> Iterator[ManifestFinding]:
    wanted = sum(getattr(vm, what) for vm in vms)
    if wanted <= available:
        return
    largest = max(vms, key=lambda vm: int(getattr(vm, what)))
    message = f"all VMs need {wanted} MiB; this host has {available} MiB of {where}"
    yield manifest.finding(Fault(f"machines.{largest.name}.{what}", "too_large", message))


def _existing_parent(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


@click.command()
@file_argument
@place_option
def validate(file: str, state_dir: Path | None) -> None:
    """Check the gateway that FILE declares. Nothing is changed.

    All faults are reported at once, as FILE:LINE:COLUMN, also values too large for this host.
    """
    manifest, _ = read_valid_gateway(file, state_dir)
    spec = manifest.spec
    memory = sum(vm.memory for vm in spec.machines)
    disk = sum(vm.disk for vm in spec.machines)
    echo(
        f"{manifest.file}: {spec.name}: valid; {len(spec.machines)} VMs, "
        f"{memory} MiB of memory, up to {disk} MiB of disk"
    )


@click.command()
@file_argument
@vms_argument
@place_option
@click.option("--upgrade", is_flag=True, help="Switch to the current images; services keep their data.")
@click.option(
    "--remove",
    metavar="VM",
    multiple=True,
    help="Remove a VM that FILE no longer declares, with its data.",
)
@click.option("--boot-test/--no-boot-test", default=True, help="Boot images that are built.")
def install(
    file: str,
    vms: tuple[str, ...],
    state_dir: Path | None,
    upgrade: bool,
    remove: tuple[str, ...],
    boot_test: bool,
) -> None:
    """Make images, disks and keys for all or some VMs of the gateway in FILE.

    Missing images are built. Installing again applies a changed declaration at the next boot of its
    VMs; it keeps disks, keys, and the images that they were installed with.
    """
    manifest, place = read_valid_gateway(file, state_dir)
    spec = manifest.spec
    before = None
    with suppress(NotFound):
        before = place.installed()
    if before is not None and before.gateway.name != spec.name:
        raise Conflict(f"{place.directory} is the gateway {before.gateway.name}, not {spec.name}")
    if before is not None and (place.directory / "control").exists() and not is_stopped(place):
        raise Conflict(f"VMs of {spec.name} run", hint="vmjobs gateway stop")
    gone = _vms_to_remove(manifest, place, remove)
    digests = dict(before.images) if before is not None else {}
    for name in select_vms(spec, vms):
        vm = spec.vm(name)
        if vm is not None and (upgrade or name not in digests):
            digests[name] = _ensure_image(manifest, vm, boot_test)
    missing = [m.name for m in spec.machines if m.name not in digests]
    if missing and before is None and not vms:
        raise NotFound(f"there is no image for {', '.join(missing)}")
    _write_installation(place, manifest, digests, before, gone)
    for vm in spec.machines:
        state = f"image {digests[vm.name]}" if vm.name in digests else "not installed"
        echo(f"{vm.name} ({vm.role}, {vm.address}): {state}")
    echo(f"{spec.name} is installed in {place.directory}")


def _vms_to_remove(
    manifest: GatewayManifest, place: GatewayDirectory, remove: Sequence[str]
) -> list[str]:
    """Return the VMs to remove: those that exist here and are no longer declared.

    Raises:
        InvalidRequest: a VM in ``remove`` is declared. Conflict: an undeclared VM is not in ``remove``.
    """
    declared = {vm.name for vm in manifest.spec.machines}
    if both := sorted(declared & set(remove)):
        raise InvalidRequest(f"{manifest.file} declares {', '.join(both)}: it cannot be removed")
    gone = sorted(set(place.records()) - declared)
    if kept := [name for name in gone if name not in remove]:
        raise Conflict(
            f"{manifest.file} does not declare {', '.join(kept)}, whose data would be lost",
            hint=" ".join(f"--remove {name}" for name in kept),
        )
    return gone


def _ensure_image(manifest: GatewayManifest, vm: GatewayVm, boot_test: bool) -> str:
    """Return the digest of a VM's image; build the image if it is missing."""
    if vm.image is not None:
        with suppress(NotFound):
            return images().resolve(vm.image)
    from images import recipe as recipes  # noqa: PLC0415
    from node.cli.build import build_here  # noqa: PLC0415

    wanted = vm.recipe or (vm.image or "").partition(":")[0]
    if vm.recipe is None and wanted not in recipes.names():
        message = f"found neither an image nor a recipe of the name {vm.image}"
        raise_findings([manifest.finding(Fault(f"machines.{vm.name}.image", "not_found", message))])
    if vm.recipe is not None and "/" not in wanted and manifest.file != "<stdin>":
        beside = Path(manifest.file).parent / wanted
        wanted = str(beside) if beside.exists() else wanted
    (entry,) = build_here([wanted], boot_test)
    return entry.digest


def _write_installation(
    place: GatewayDirectory,
    manifest: GatewayManifest,
    digests: dict[str, str],
    before: InstalledGateway | None,
    gone: Sequence[str],
) -> None:
    """Make missing files; ``gateway.json`` last: it marks a complete installation."""
    spec = manifest.spec
    place.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.directory.chmod(0o700)
    known = {vm.name for vm in spec.machines}
    installed = InstalledGateway(
        schema=1,
        gateway=spec,
        images={n: d for n, d in digests.items() if n in known},
        kind=GATEWAY_HYPERVISOR,
    )
    with place.lock_supervisor():
        if not is_stopped(place):
            raise Conflict(f"VMs of {spec.name} run", hint="vmjobs gateway stop")
        there = place.secrets()
        made = role_kit().secrets(spec)
        place.save_secrets({name: data for name, data in made.items() if name not in there})
        for vm in (vm for vm in spec.machines if vm.name in digests):
            if before is not None and vm.name in before.images:
                persistent_disks.record_root(place.disks(vm.name), before.images[vm.name])
            persistent_disks.remove_roots(place.disks(vm.name), keep=digests[vm.name])
            place.prepare(installed, vm)
            tag_image(installed, vm.name)
        place.save(installed)
        for name in gone:
            place.remove(name)
        if before is not None:
            for name, digest in before.images.items():
                if installed.images.get(name) != digest:
                    untag_image(before, name)
