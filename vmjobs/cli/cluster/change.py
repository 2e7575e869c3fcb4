"""``vmjobs cluster scale``, ``upgrade``, ``drain``, ``resume``, ``retry``, ``delete``."""

from __future__ import annotations

import click

from vmjobs.cli.cluster.apply import apply_spec, print_outcome
from vmjobs.cli.cluster.common import format_vm_count, name_argument
from vmjobs.cli.cluster.wait import remaining_vms, wait_options, wait_until_empty, wait_until_up
from vmjobs.cli.common import client, echo, image_argument, json_option, print_json
from vmjobs.cluster.spec import MAX_SIZE, parse_cluster
from vmjobs.cluster.vm_state import ClusterVmState
from vmjobs.cluster.wire import Cluster


@click.command()
@name_argument
@click.argument("size", metavar="N", type=click.IntRange(0, MAX_SIZE))
@wait_options("all VMs are UP")
@json_option
def scale(name: str, size: int, wait: bool, timeout: float, as_json: bool) -> None:
    """Change the number of VMs of the cluster NAME to N. Surplus VMs are drained."""
    with client() as api:
        before = api.clusters.get(name)
        found = api.clusters.scale(name, size)
        if not as_json:
            echo(f"{name}: {before.target} -> {format_vm_count(found.target)}")
        if wait:
            (found,) = wait_until_up(api.clusters, [name], timeout, as_declared=False)
    if as_json:
        print_json(found)


@click.command()
@name_argument
@image_argument
@wait_options("all VMs are UP")
@json_option
def upgrade(name: str, image: str, wait: bool, timeout: float, as_json: bool) -> None:
    """Change the image of the cluster NAME to IMAGE.

    The VMs are replaced one at a time, each once its jobs have ended.
    """
    with client() as api:
        declared = api.clusters.get(name).spec.model_dump(mode="json")
        applied, changed = apply_spec(api.clusters, parse_cluster({**declared, "image": image}))
        found = applied.cluster
        if not as_json:
            print_outcome(applied, changed)
        if wait:
            (found,) = wait_until_up(api.clusters, [name], timeout)
    if as_json:
        print_json(found)


@click.command()
@name_argument
@wait_options("all VMs have stopped")
@json_option
def drain(name: str, wait: bool, timeout: float, as_json: bool) -> None:
    """Stop all VMs of the cluster NAME once their jobs have ended, but keep it."""
    with client() as api:
        found = api.clusters.drain(name)
        if not as_json:
            echo(f"{name} is draining: {_running_text(found)}")
        if wait:
            found = wait_until_empty(api.clusters, found, timeout) or found
    if as_json:
        print_json(found)


@click.command()
@name_argument
@json_option
def resume(name: str, as_json: bool) -> None:
    """Start the VMs of the cluster NAME again after `drain`."""
    with client() as api:
        found = api.clusters.resume(name)
    if as_json:
        print_json(found)
        return
    echo(f"{name} is resumed: {format_vm_count(found.target)} wanted, {found.up} UP")


@click.command()
@name_argument
@wait_options("all VMs are UP")
@json_option
def retry(name: str, wait: bool, timeout: float, as_json: bool) -> None:
    """Retry at once what failed in the cluster NAME.

    The service forgets failures of its images, restarts VMs in BACKOFF, and declares again a
    generation that was rolled back.
    """
    with client() as api:
        before = api.clusters.get(name)
        found = api.clusters.retry(name)
        if not as_json:
            again = f"generation {before.failed.generation} is declared again" if before.failed else ""
            echo(f"{name} is retried" + (f": {again}" if again else ""))
        if wait:
            (found,) = wait_until_up(api.clusters, [name], timeout)
    if as_json:
        print_json(found)


@click.command()
@name_argument
@click.option("--drain", "mode", flag_value="drain", help="Let running jobs end first (default).")
@click.option("--now", "mode", flag_value="now", help="Stop all VMs and their jobs at once.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@wait_options("the cluster and all of its VMs are gone")
@json_option
def delete(name: str, mode: str | None, yes: bool, wait: bool, timeout: float, as_json: bool) -> None:
    """Delete the cluster NAME with all of its VMs.

    If VMs are up and no option says how they end, the command asks.
    """
    with client() as api:
        before = api.clusters.get(name)
        if mode is None and not yes and _count_up(before):
            question = f"{name}: {_running_text(before)}. Delete it once its jobs have ended?"
            click.confirm(question, abort=True, err=True)
        found = api.clusters.delete(name, "now" if mode == "now" else "drain")
        if not as_json:
            ending = "at once" if mode == "now" else "once their jobs have ended"
            left = len(remaining_vms(found))
            echo(
                f"{name} is deleted" + (f"; {format_vm_count(left)} will stop {ending}" if left else "")
            )
        if wait:
            wait_until_empty(api.clusters, found, timeout)
    if as_json:
        print_json(found)


def _count_up(cluster: Cluster) -> int:
    return sum(vm.state is ClusterVmState.UP or vm.busy for vm in cluster.members)


def _running_text(cluster: Cluster) -> str:
    busy = sum(vm.busy for vm in cluster.members)
    return f"{format_vm_count(_count_up(cluster))} up, {busy} of them with jobs"
