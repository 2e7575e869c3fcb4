"""``vmjobs gateway upgrade``: switches VMs to the current images while the gateway runs.

An interrupted upgrade is finished by the next one: the old image has its tag until then. Each image has
a root disk of its own, so whatever boots in between gets the right one.
"""

from __future__ import annotations

from pathlib import Path

import click

from node.cli.gateway.common import (
    connect_supervisor,
    end_idle_supervisor,
    find_gateway,
    gateway_options,
    images,
    select_vms,
    tag_image,
    tagged_images,
    untag_image,
    vms_argument,
    wait_for_vms,
)
from vmjobs.agent.cluster_vms import persistent_disks
from vmjobs.cli.common import echo
from vmjobs.errors import Conflict, HypervisorError
from vmjobs.file_lock import file_lock
from vmjobs.gateway.assignments import GatewayVmState
from vmjobs.gateway.control import SupervisorClient
from vmjobs.gateway.directory import GatewayDirectory, InstalledGateway
from vmjobs.gateway.spec import GatewayVm


@click.command()
@vms_argument
@gateway_options
@click.option(
    "--timeout", type=click.IntRange(1), default=600, show_default=True, help="Seconds to be up in."
)
def upgrade(vms: tuple[str, ...], name: str | None, state_dir: Path | None, timeout: int) -> None:
    """Switch VMs, or all of them, to the images that now have their names, one after the other.

    The others run on. Root disks are new then; services keep their data. A VM that is not up in time
    gets its old image and root disk back, and no further VM is upgraded.
    """
    place = find_gateway(name, state_dir)
    gateway = place.installed().gateway
    busy = Conflict(f"VMs of {gateway.name} are being upgraded already")
    with file_lock(place.directory / "upgrade.lock", busy), connect_supervisor(place) as control:
        for chosen in select_vms(gateway, vms):
            vm = gateway.vm(chosen)
            if vm is not None:
                _upgrade(place, control, vm, timeout)
        end_idle_supervisor(control)


def _upgrade(place: GatewayDirectory, control: SupervisorClient, vm: GatewayVm, timeout: float) -> None:
    before = place.installed()
    present = before.images.get(vm.name)
    if vm.image is None or present is None:
        what = "it has a recipe of its own" if vm.image is None else "it is not installed"
        echo(f"{vm.name}: {what}; vmjobs gateway install FILE --upgrade")
        return
    new, others = images().resolve(vm.image), tagged_images(before, vm.name) - {present}
    if new == present and not others:
        echo(f"{vm.name}: has the current image {new}")
        return
    old = present if new != present else others.pop()  # an upgrade was interrupted
    if new != present:
        persistent_disks.record_root(place.disks(vm.name), present)
        persistent_disks.remove_roots(place.disks(vm.name), keep=present)
    if why := _switch(place, control, vm.name, new, timeout):
        again = _switch(place, control, vm.name, old, timeout)
        _keep_only(place, vm.name, old)
        ending = f"and is not up: {again}" if again else "and is up"
        raise HypervisorError(
            f"{vm.name} is not up with its new image {new}: {why}",
            hint=f"it has its old image again, {ending}",
        )
    _keep_only(place, vm.name, new)
    echo(f"{vm.name}: image {new}")


def _switch(
    place: GatewayDirectory, control: SupervisorClient, vm: str, digest: str, timeout: float
) -> str:
    """Give a VM another image, and boot it again if it is to run; return why it is not up, if so."""
    changed = _with_image(place.installed(), vm, digest)
    tag_image(changed, vm)
    place.save(changed)
    control.ask("restart", vms=[vm])
    if vm not in place.wanted():
        return ""
    left = wait_for_vms(control, [vm], timeout, GatewayVmState.UP)
    return "".join(f"{m['state']} {m['message']}".strip() for _, m in left)


def _keep_only(place: GatewayDirectory, vm: str, digest: str) -> None:
    """Remove the root disks and the tags of a VM's other images."""
    installed = place.installed()
    persistent_disks.remove_roots(place.disks(vm), keep=digest)
    for other in tagged_images(installed, vm) - {digest}:
        untag_image(_with_image(installed, vm, other), vm)


def _with_image(installed: InstalledGateway, vm: str, digest: str) -> InstalledGateway:
    return installed.model_copy(update={"images": {**installed.images, vm: digest}})
