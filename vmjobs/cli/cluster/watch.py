"""``vmjobs cluster events`` and ``console``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from vmjobs.cli.cluster.common import complete_vm_name, name_argument
from vmjobs.cli.cluster.wait import LAST_POLL_SECONDS
from vmjobs.cli.common import client, echo, json_option, print_json, print_table
from vmjobs.cluster.vm_state import ClusterVmState
from vmjobs.cluster.wire import ClusterEvent, ClusterVm
from vmjobs.errors import NotFound
from vmjobs.terminal import ByteSink, guest_output, printable

if TYPE_CHECKING:
    from vmjobs.client.clusters import Clusters


@click.command()
@name_argument
@click.option("-f", "--follow", is_flag=True, help="Follow until the cluster is gone.")
@click.option("--after", type=click.IntRange(min=0), default=0, help="Only events after number N.")
@json_option
def events(name: str, follow: bool, after: int, as_json: bool) -> None:
    """Show the events of the cluster NAME and its VMs, oldest first.

    With --follow, --json prints one object per line.
    """
    with client() as api:
        found = api.clusters.events(name, after)
        if follow:
            _follow_events(api.clusters, name, found, as_json)
        elif as_json:
            print_json(found)
        else:
            print_table(("#", "TIME", "VM", "NODE", "STATE", "REASON", ""), map(_cells, found))


def _cells(event: ClusterEvent) -> tuple[str, ...]:
    moment = event.time.astimezone().isoformat(" ", "seconds")
    text = event.message.partition("\n")[0]
    return (str(event.seq), moment, event.member, event.node, event.state, event.code, text)


def _follow_events(api: Clusters, name: str, found: Sequence[ClusterEvent], as_json: bool) -> None:
    last = 0
    while True:
        for event in found:
            line = printable("  ".join(filter(None, _cells(event))))
            echo(json.dumps(event.model_dump(mode="json")) if as_json else line)
            last = event.seq
        time.sleep(0 if found else LAST_POLL_SECONDS)
        try:
            found = api.events(name, last)
        except NotFound:
            return


@click.command()
@name_argument
@click.argument("vm", metavar="VM", shell_complete=complete_vm_name)
@click.option("-f", "--follow", is_flag=True, help="Follow until the VM is gone for good.")
def console(name: str, vm: str, follow: bool) -> None:
    """Print the serial console of a VM of the cluster NAME, from its first byte on.

    VM is its name or its number. With --follow, the output continues with the VM's next start.
    """
    wanted = f"{name}-{vm}" if vm.isdigit() else vm
    with client() as api:
        found = _find_vm(api.clusters, name, wanted)
        if found is None:
            raise NotFound(f"{name} has no VM {wanted}", hint=f"see `vmjobs cluster show {name}`")
        _print_console(api.clusters, name, found, follow)


def _find_vm(api: Clusters, name: str, wanted: str) -> ClusterVm | None:
    return next((vm for vm in api.get(name).members if vm.name == wanted), None)


def _print_console(api: Clusters, name: str, vm: ClusterVm, follow: bool) -> None:
    incarnation, offset = vm.incarnation, 0
    sink = guest_output(sys.stdout.buffer)
    while True:
        offset, before = _copy_console(api, name, vm.name, incarnation, offset, sink), offset
        if not follow:
            return
        if offset == before:
            time.sleep(LAST_POLL_SECONDS)
        found = _refresh_vm(api, name, vm)
        if found is None:
            return
        if found.incarnation != incarnation:
            _copy_console(api, name, vm.name, incarnation, offset, sink)
            echo(f"vmjobs: {vm.name} was restarted ({found.incarnation})", err=True)
            incarnation, offset = found.incarnation, 0


def _copy_console(
    api: Clusters, name: str, vm: str, incarnation: int, offset: int, sink: ByteSink
) -> int:
    """Print the console from ``offset`` on; return the offset of its end."""
    if not incarnation:
        return offset
    for data in api.console(name, vm, offset, incarnation):
        sink.write(data)
        sink.flush()
        offset += len(data)
    return offset


def _refresh_vm(api: Clusters, name: str, vm: ClusterVm) -> ClusterVm | None:
    """Return the current state of the same VM; None if it is gone for good."""
    try:
        found = _find_vm(api, name, vm.name)
    except NotFound:
        return None
    over = found is None or found.id != vm.id or found.state is ClusterVmState.GONE
    return None if over else found
