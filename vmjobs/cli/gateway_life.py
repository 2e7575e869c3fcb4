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

from vmjobs.cli.gateway_support import (
    READY,
    chosen,
    forget_image,
    gateway_options,
    kit,
    machine_parts,
    place_of,
    resting,
    supervised,
    watched,
)
from vmjobs.cli.logs import configure_logging
from vmjobs.cli.support import config, echo
from vmjobs.errors import HypervisorError, InvalidRequest, Unavailable
from vmjobs.gateway.control import Control
from vmjobs.gateway.place import DRAIN_SECONDS
from vmjobs.gateway.share import Condition

#: Failures in a row after which ``boot`` stops waiting; the supervisor keeps trying.
MANY_FAILURES = 3

_Machines = dict[str, dict[str, Any]]


@click.command()
@click.argument("machines", nargs=-1)
@gateway_options
@click.option(
    "--timeout", type=click.IntRange(1), default=600, show_default=True, help="Seconds to wait."
)
def boot(machines: tuple[str, ...], name: str | None, state_dir: Path | None, timeout: int) -> None:
    """Start MACHINES, or all of them, and wait until their services answer.

    Running machines are left alone. If no supervisor runs, one is started in the background; it
    restarts machines that end.
    """
    place = place_of(name, state_dir)
    wanted = chosen(place.installed(), machines)
    absent = [name for name in wanted if name not in place.installed().images]
    if absent:
        raise InvalidRequest(
            f"not installed: {', '.join(absent)}", hint=f"vmjobs gateway install FILE {absent[0]}"
        )
    with supervised(place) as control:
        control.ask("want", run=wanted)
        left = _wait(control, wanted, timeout, lambda m: m["state"] == Condition.UP, _hopeless)
    if left:
        listing = "; ".join(f"{name} is {m['state']}: {m['message']}".rstrip(": ") for name, m in left)
        raise HypervisorError(
            f"not up: {listing}",
            hint=f"the supervisor keeps trying; vmjobs gateway console {left[0][0]}",
        )


@click.command()
@click.argument("machines", nargs=-1)
@gateway_options
def stop(machines: tuple[str, ...], name: str | None, state_dir: Path | None) -> None:
    """Shut MACHINES down, or all of them. They keep their data."""
    place = place_of(name, state_dir)
    wanted = chosen(place.installed(), machines)
    with supervised(place) as control:
        control.ask("want", stop=wanted)
        seconds = 2.0 * DRAIN_SECONDS
        left = _wait(control, wanted, seconds, lambda m: m["state"] == Condition.STOPPED)
        if left:
            raise HypervisorError(f"not stopped: {', '.join(name for name, _ in left)}")
        _leave_if_idle(control)


def _leave_if_idle(control: Control) -> None:
    """Stop a background supervisor if no VM runs or is wanted."""
    machines = control.ask("show")["machines"].values()
    if any(machine["state"] != Condition.STOPPED or machine["wanted"] for machine in machines):
        return
    control.ask("idle")


def _hopeless(machine: dict[str, Any]) -> bool:
    return int(machine.get("failures", 0)) >= MANY_FAILURES or machine["state"] == Condition.DOWN


def _wait(
    control: Control,
    names: list[str],
    seconds: float,
    done: Callable[[dict[str, Any]], bool],
    hopeless: Callable[[dict[str, Any]], bool] = lambda _machine: False,
) -> list[tuple[str, dict[str, Any]]]:
    """Wait until all VMs are ``done``; print state changes; return the other VMs."""
    terminal = Console(stderr=True)
    last: dict[str, str] = {}
    machines: _Machines = {}
    with terminal.status("waiting") as status:
        for machines in watched(control, seconds):
            for name in names:
                text = f"{machines[name]['state']} {machines[name]['message']}".strip()
                if last.get(name) != text:
                    echo(f"{name}: {text}")
                    last[name] = text
            waiting = [n for n in names if not done(machines[n])]
            status.update(f"waiting for {', '.join(waiting)}")
            if all(hopeless(machines[n]) for n in waiting):
                break
    return [(name, machines[name]) for name in names if not done(machines[name])]


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
    place = place_of(name, state_dir)
    with place.alone():
        supervisor = Supervisor(place, kit(), machine_parts(place), leaves=background)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: supervisor.stop.set())
        with supervisor.running():
            if background:
                os.write(sys.stdout.fileno(), READY)
            supervisor.stop.wait()


@click.command()
@gateway_options
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def delete(ctx: click.Context, name: str | None, state_dir: Path | None, yes: bool) -> None:
    """Delete the gateway: its machines and all data."""
    place = place_of(name, state_dir)
    installed = place.installed()
    if not yes:
        click.confirm(f"Remove {installed.gateway.name} with all its data?", abort=True)
    ctx.invoke(stop, machines=(), name=name, state_dir=state_dir)
    try:
        with Control(place.control) as control:
            control.ask("quit")
    except Unavailable:
        pass
    with resting(place, "it cannot be removed"):
        for machine in installed.images:
            forget_image(installed, machine)
        (place.directory / "gateway.json").unlink()
        shutil.rmtree(place.directory)
    echo(f"{installed.gateway.name} is deleted")
