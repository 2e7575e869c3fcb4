"""``vmjobs gateway boot``, ``stop``, ``run`` and ``delete``."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import click

from node.cli.gateway.common import (
    READY_LINE,
    connect_supervisor,
    end_idle_supervisor,
    find_gateway,
    gateway_options,
    is_stopped,
    role_kit,
    select_vms,
    untag_image,
    vm_services_factory,
    vms_argument,
    wait_for_vms,
)
from node.cli.gateway.enable import remove_units
from vmjobs.cli.common import config, echo
from vmjobs.cli.logs import configure_logging
from vmjobs.errors import Conflict, HypervisorError, InvalidRequest, Unavailable
from vmjobs.gateway.assignments import GatewayVmState
from vmjobs.gateway.control import SupervisorClient
from vmjobs.gateway.directory import DRAIN_SECONDS

#: Seconds that a supervisor may take to exit.
EXIT_SECONDS = 30.0


@click.command()
@vms_argument
@gateway_options
@click.option(
    "--timeout", type=click.IntRange(1), default=600, show_default=True, help="Seconds to wait."
)
def boot(vms: tuple[str, ...], name: str | None, state_dir: Path | None, timeout: int) -> None:
    """Start VMs, or all of them, and wait until their services answer.

    Running VMs are left alone. If no supervisor runs, one is started in the background; it
    restarts VMs that end.
    """
    place = find_gateway(name, state_dir)
    wanted = select_vms(place.installed().gateway, vms)
    absent = [name for name in wanted if name not in place.installed().images]
    if absent:
        raise InvalidRequest(
            f"not installed: {', '.join(absent)}", hint=f"vmjobs gateway install FILE {absent[0]}"
        )
    with connect_supervisor(place) as control:
        control.ask("want", run=wanted)
        left = wait_for_vms(control, wanted, timeout, GatewayVmState.UP)
    if left:
        listing = "; ".join(f"{name} is {m['state']}: {m['message']}".rstrip(": ") for name, m in left)
        raise HypervisorError(
            f"not up: {listing}",
            hint=f"the supervisor keeps trying; vmjobs gateway console {left[0][0]}",
        )


@click.command()
@vms_argument
@gateway_options
def stop(vms: tuple[str, ...], name: str | None, state_dir: Path | None) -> None:
    """Shut VMs down, or all of them. They keep their data."""
    place = find_gateway(name, state_dir)
    wanted = select_vms(place.installed().gateway, vms)
    with connect_supervisor(place) as control:
        control.ask("want", stop=wanted)
        seconds = 2.0 * DRAIN_SECONDS
        left = wait_for_vms(control, wanted, seconds, GatewayVmState.STOPPED)
        if left:
            raise HypervisorError(f"not stopped: {', '.join(name for name, _ in left)}")
        end_idle_supervisor(control)


@click.command()
@gateway_options
@click.option("--background", is_flag=True, hidden=True, help="As `boot` starts it.")
def run(name: str | None, state_dir: Path | None, background: bool) -> None:
    """Supervise the gateway's VMs until a signal stops it; for a service manager.

    The supervisor starts wanted VMs, and restarts those that end. They keep running when it stops:
    the next supervisor takes them over.
    """
    from vmjobs.agent.metrics import serving  # noqa: PLC0415
    from vmjobs.gateway.metrics import GatewayMetrics  # noqa: PLC0415
    from vmjobs.gateway.supervisor import Supervisor  # noqa: PLC0415

    settings = config()
    configure_logging(settings.log_level, settings.log_format)
    place = find_gateway(name, state_dir)
    with place.lock_supervisor():
        supervisor = Supervisor(
            place, role_kit(), vm_services_factory(place), exits_when_idle=background
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: supervisor.stop.set())
        registry = GatewayMetrics(place, supervisor.assignments).registry()
        listen = supervisor.installed.gateway.metrics or ""
        with supervisor.running(), serving(registry, listen, "metrics"):
            if background:
                os.write(sys.stdout.fileno(), READY_LINE)
            supervisor.stop.wait()


@click.command()
@gateway_options
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def delete(ctx: click.Context, name: str | None, state_dir: Path | None, yes: bool) -> None:
    """Delete the gateway: its VMs and all data."""
    place = find_gateway(name, state_dir)
    installed = place.installed()
    if not yes:
        click.confirm(f"Remove {installed.gateway.name} with all its data?", abort=True)
    ctx.invoke(stop, vms=(), name=name, state_dir=state_dir)
    try:
        with SupervisorClient(place.control) as control:
            control.ask("quit")
    except Unavailable:
        pass
    with place.lock_supervisor(EXIT_SECONDS):
        if not is_stopped(place):
            message = "it cannot be removed: VMs of the gateway run"
            raise Conflict(message, hint="vmjobs gateway stop")
        for vm in installed.images:
            untag_image(installed, vm)
        remove_units(installed.gateway.name, place)
        for machine in installed.gateway.machines:
            place.remove(machine.name)
        (place.directory / "gateway.json").unlink()
        shutil.rmtree(place.directory)
    echo(f"{installed.gateway.name} is deleted")
