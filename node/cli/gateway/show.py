"""``vmjobs gateway show`` and ``console``."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from node.cli.gateway.common import find_gateway, gateway_options, select_vms
from vmjobs.cli.common import echo, format_age, json_option, print_json, print_table
from vmjobs.errors import NotFound, Unavailable
from vmjobs.gateway.assignments import vm_state
from vmjobs.gateway.control import SupervisorClient
from vmjobs.gateway.directory import GatewayDirectory, InstalledGateway
from vmjobs.model import MIB
from vmjobs.terminal import guest_output

#: Seconds between two reads of a followed console file.
POLL_SECONDS = 0.2


@click.command()
@gateway_options
@json_option
def show(name: str | None, state_dir: Path | None, as_json: bool) -> None:
    """Show the gateway and its VMs."""
    place = find_gateway(name, state_dir)
    installed = place.installed()
    spec = installed.gateway
    vms, running = _vm_states(place, installed)
    if as_json:
        print_json(
            {
                "gateway": spec.name,
                "domain": spec.domain,
                "network": str(spec.network),
                "supervisor": running,
                "directory": str(place.directory),
                "machines": [
                    {
                        "name": m.name,
                        "role": m.role,
                        "host": spec.fqdn(m),
                        "address": str(m.address),
                        "publish": [one.model_dump(mode="json") for one in m.publish],
                        "image": installed.images.get(m.name),
                        **vms[m.name],
                        "used": place.used_bytes(m.name),
                    }
                    for m in spec.machines
                ],
            }
        )
        return
    supervisor = "a supervisor runs" if running else "no supervisor runs: states are the last known"
    echo(f"{spec.name}: {spec.domain}, {spec.network}; {supervisor}")
    rows = []
    for vm in spec.machines:
        state = vms[vm.name]
        since = format_age(datetime.fromisoformat(state["since"])) if state.get("since") else ""
        used = f"{place.used_bytes(vm.name) // MIB} MiB"
        rows.append(
            (
                vm.name,
                vm.role,
                str(vm.address),
                " ".join(f"{one}:{one.vm_port}" for one in vm.publish),
                state["state"],
                since,
                used,
                "" if state.get("full") is None else f"{state['full']}%",
                str(state["message"]).partition("\n")[0][:80],
            )
        )
    print_table(
        ("VM", "ROLE", "ADDRESS", "PUBLISHED", "STATE", "SINCE", "DISKS", "FULL", "MESSAGE"), rows
    )


def _vm_states(
    place: GatewayDirectory, installed: InstalledGateway
) -> tuple[dict[str, dict[str, Any]], bool]:
    """Return the state of each VM by name, and whether it comes from a supervisor."""
    try:
        with SupervisorClient(place.control) as control:
            return control.ask("show")["machines"], True
    except Unavailable:
        pass
    records = place.records()
    found: dict[str, dict[str, Any]] = {}
    for vm in installed.gateway.machines:
        record = records.get(vm.name)
        if record is None:
            found[vm.name] = {"state": "absent", "message": "not installed"}
            continue
        condition = vm_state(record.phase, True if record.admitted else None)
        since = datetime.fromtimestamp(record.since).astimezone().isoformat() if record.since else ""
        found[vm.name] = {
            "state": condition,
            "message": record.message,
            "since": since,
            "incarnation": record.incarnation,
        }
    return found, False


@click.command()
@click.argument("vm", metavar="VM")
@gateway_options
@click.option("-f", "--follow", is_flag=True, help="Follow the console until interrupted.")
def console(vm: str, name: str | None, state_dir: Path | None, follow: bool) -> None:
    """Print the console of VM since its last boot."""
    place = find_gateway(name, state_dir)
    select_vms(place.installed().gateway, [vm])
    path = place.console(vm)
    if path is None or not path.exists():
        raise NotFound(f"{vm} has not been booted yet")
    offset = 0
    sink = guest_output(sys.stdout.buffer)
    while True:
        with path.open("rb") as file:
            if path.stat().st_size < offset:
                offset = 0  # the file was truncated at its size limit
            file.seek(offset)
            data = file.read()
        offset += len(data)
        sink.write(data)
        sink.flush()
        if not follow:
            return
        if not data:
            time.sleep(POLL_SECONDS)
        newer = place.console(vm)
        if newer is not None and newer != path and newer.exists():
            path, offset = newer, 0
