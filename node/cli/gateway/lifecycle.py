"""``vmjobs gateway boot``, ``stop``, ``run`` and ``delete``."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from node.cli.gateway.common import (
    READY_LINE,
    connect_supervisor,
    find_gateway,
    gateway_options,
    is_stopped,
    machine_parts,
    machines_argument,
    role_kit,
    select_machines,
    untag_image,
    watch_machines,
)
from vmjobs.cli.common import config, echo
from vmjobs.cli.logs import configure_logging
from vmjobs.errors import Conflict, HypervisorError, InvalidRequest, Unavailable
from vmjobs.gateway.assignments import GatewayVmState
from vmjobs.gateway.control import SupervisorClient
from vmjobs.gateway.directory import DRAIN_SECONDS

#: Seconds that a supervisor may take to exit.
EXIT_SECONDS = 30.0
#: Failures in a row after which ``boot`` stops waiting; the supervisor keeps trying.
MAX_FAILURES = 3

_Machines = dict[str, dict[str, Any]]


@click.command()
@machines_argument
@gateway_options
@click.option(
    "--timeout", type=click.IntRange(1), default=600, show_default=True, help="Seconds to wait."
)
def boot(machines: tuple[str, ...], name: str | None, state_dir: Path | None, timeout: int) -> None:
    """Start MACHINES, or all of them, and wait until their services answer.

    Running machines are left alone. If no supervisor runs, one is started in the background; it
    restarts machines that end.
    """
    place = find_gateway(name, state_dir)
    wanted = select_machines(place.installed(), machines)
    absent = [name for name in wanted if name not in place.installed().images]
    if absent:
        raise InvalidRequest(
            f"not installed: {', '.join(absent)}", hint=f"vmjobs gateway install FILE {absent[0]}"
        )
    with connect_supervisor(place) as control:
        control.ask("want", run=wanted)
        left = _wait(control, wanted, timeout, lambda m: m["state"] == GatewayVmState.UP, _has_failed)
    if left:
        listing = "; ".join(f"{name} is {m['state']}: {m['message']}".rstrip(": ") for name, m in left)
        raise HypervisorError(
            f"not up: {listing}",
            hint=f"the supervisor keeps trying; vmjobs gateway console {left[0][0]}",
        )


@click.command()
@machines_argument
@gateway_options
def stop(machines: tuple[str, ...], name: str | None, state_dir: Path | None) -> None:
    """Shut MACHINES down, or all of them. They keep their data."""
    place = find_gateway(name, state_dir)
    wanted = select_machines(place.installed(), machines)
    with connect_supervisor(place) as control:
        control.ask("want", stop=wanted)
        seconds = 2.0 * DRAIN_SECONDS
        left = _wait(control, wanted, seconds, lambda m: m["state"] == GatewayVmState.STOPPED)
        if left:
            raise HypervisorError(f"not stopped: {', '.join(name for name, _ in left)}")
        _stop_idle_supervisor(control)


def _stop_idle_supervisor(control: SupervisorClient) -> None:
    """Stop a background supervisor if no VM runs or is wanted."""
    machines = control.ask("show")["machines"].values()
    if any(machine["state"] != GatewayVmState.STOPPED or machine["wanted"] for machine in machines):
        return
    control.ask("idle")


def _has_failed(machine: dict[str, Any]) -> bool:
    return int(machine.get("failures", 0)) >= MAX_FAILURES or machine["state"] == GatewayVmState.DOWN


def _wait(
    control: SupervisorClient,
    names: list[str],
    seconds: float,
    is_done: Callable[[dict[str, Any]], bool],
    has_failed: Callable[[dict[str, Any]], bool] = lambda _machine: False,
) -> list[tuple[str, dict[str, Any]]]:
    """Wait until all VMs are ``is_done``; print state changes; return the other VMs."""
    terminal = Console(stderr=True)
    last: dict[str, str] = {}
    machines: _Machines = {}
    with terminal.status("waiting") as status:
        for machines in watch_machines(control, seconds):
            for name in names:
                text = f"{machines[name]['state']} {machines[name]['message']}".strip()
                if last.get(name) != text:
                    echo(f"{name}: {text}")
                    last[name] = text
            waiting = [n for n in names if not is_done(machines[n])]
            status.update(f"waiting for {', '.join(waiting)}")
            if all(has_failed(machines[n]) for n in waiting):
                break
    return [(name, machines[name]) for name in names if not is_done(machines[name])]


@click.command()
@gateway_options
@click.option("--background", is_flag=True, hidden=True, help="As `boot` starts it.")
def run(name: str | None, state_dir: Path | None, background: bool) -> None:
    """Supervise the gateway's machines until a signal stops it; for a service manager.

    The supervisor starts wanted machines, and restarts those that end. They keep running when it stops:
    the next supervisor takes them over.
    """
    from vmjobs.gateway.supervisor import Supervisor  # noqa: PLC0415

    settings = config()
    configure_logging(settings.log_level, settings.log_format)
    place = find_gateway(name, state_dir)
    with place.lock_supervisor():
        supervisor = Supervisor(place, role_kit(), machine_parts(place), exits_when_idle=background)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: supervisor.stop.set())
        with supervisor.running():
            if background:
                os.write(sys.stdout.fileno(), READY_LINE)
            supervisor.stop.wait()


@click.command()
@gateway_options
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def delete(ctx: click.Context, name: str | None, state_dir: Path | None, yes: bool) -> None:
    """Delete the gateway: its machines and all data."""
    place = find_gateway(name, state_dir)
    installed = place.installed()
    if not yes:
        click.confirm(f"Remove {installed.gateway.name} with all its data?", abort=True)
    ctx.invoke(stop, machines=(), name=name, state_dir=state_dir)
    try:
        with SupervisorClient(place.control) as control:
            control.ask("quit")
    except Unavailable:
        pass
    with place.lock_supervisor(EXIT_SECONDS):
        if not is_stopped(place):
            message = "it cannot be removed: machines of the gateway run"
            raise Conflict(message, hint="vmjobs gateway stop")
        for machine in installed.images:
            untag_image(installed, machine)
        (place.directory / "gateway.json").unlink()
        shutil.rmtree(place.directory)
    echo(f"{installed.gateway.name} is deleted")
