"""``vmjobs gateway upgrade``: switches VMs to the current images while the gateway runs."""

from __future__ import annotations

from pathlib import Path

import click

from node.cli.gateway.common import (
    connect_supervisor,
    find_gateway,
    gateway_options,
    images,
    running_vms,
    select_vms,
    tag_image,
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
from vmjobs.gateway.directory import DRAIN_SECONDS, GatewayDirectory
from vmjobs.gateway.spec import GatewayVm
from vmjobs.model import Digest


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


def _upgrade(place: GatewayDirectory, control: SupervisorClient, vm: GatewayVm, timeout: float) -> None:
    before = place.installed()
    if vm.image is None:
        echo(f"{vm.name}: it has a recipe of its own; vmjobs gateway install FILE --upgrade builds it")
        return
    old, new = before.images.get(vm.name), Digest(images().resolve(vm.image))
    if old is None or old == new:
        echo(f"{vm.name}: {'not installed' if old is None else f'has the current image {new}'}")
        return
    is_wanted = vm.name in place.wanted()
    changed = before.model_copy(update={"images": {**before.images, vm.name: new}})
    tag_image(changed, vm.name)
    _switch(place, control, vm.name, new)
    if is_wanted and (why := _boot(control, vm.name, timeout)):
        _switch(place, control, vm.name, old)
        untag_image(changed, vm.name)
        again = _boot(control, vm.name, timeout)
        raise HypervisorError(
            f"{vm.name} is not up with its new image {new}: {why}",
            hint="it has its old image again"
            + (f", and is not up: {again}" if again else ", and is up"),
        )
    persistent_disks.drop_stored_roots(place.disks(vm.name))
    untag_image(before, vm.name)
    echo(f"{vm.name}: image {new}")


def _switch(place: GatewayDirectory, control: SupervisorClient, vm: str, digest: Digest) -> None:
    """Stop a VM, and give it another image, with the root disk that it had with that image."""
    control.ask("want", stop=[vm])
    wait_for_vms(control, [vm], 2.0 * DRAIN_SECONDS, GatewayVmState.STOPPED)
    if vm in running_vms(place):
        raise HypervisorError(f"{vm} does not stop")
    place.finish_switch(vm)  # an upgrade was killed
    place.switch_image(vm, digest)
    control.ask("reload")


def _boot(control: SupervisorClient, vm: str, timeout: float) -> str:
    """Start a VM, and wait until it is up; return why it is not, or ``""``."""
    control.ask("want", run=[vm])
    left = wait_for_vms(control, [vm], timeout, GatewayVmState.UP)
    return "".join(f"{m['state']} {m['message']}".strip() for _, m in left)
