"""``vmjobs cluster scale``, ``upgrade``, ``drain``, ``resume``, ``retry`` and ``delete``."""

from __future__ import annotations

import click

from vmjobs.cli.cluster_apply import apply_spec, tell
from vmjobs.cli.cluster_support import machines, name_argument
from vmjobs.cli.cluster_wait import there, wait_options, wait_until_empty, wait_until_up
from vmjobs.cli.image_support import complete_image
from vmjobs.cli.support import client, echo, json_option, print_json
from vmjobs.cluster.member import MemberState
from vmjobs.cluster.spec import MAX_SIZE, parse_cluster
from vmjobs.cluster.wire import Cluster


@click.command()
@name_argument
@click.argument("size", metavar="N", type=click.IntRange(0, MAX_SIZE))
@wait_options("all machines are UP")
@json_option
def scale(name: str, size: int, wait: bool, timeout: float, as_json: bool) -> None:
    """Have N machines in the cluster NAME. Those that are too many end with their jobs."""
    with client() as api:
        before = api.clusters.get(name)
        found = api.clusters.scale(name, size)
        if not as_json:
            echo(f"{name}: {before.target} -> {machines(found.target)}")
        if wait:
            (found,) = wait_until_up(api.clusters, [name], timeout, as_declared=False)
    if as_json:
        print_json(found)


@click.command()
@name_argument
@click.argument("image", metavar="IMAGE", shell_complete=complete_image)
@wait_options("all machines are UP")
@json_option
def upgrade(name: str, image: str, wait: bool, timeout: float, as_json: bool) -> None:
    """Have the machines of the cluster NAME run IMAGE.

    They are replaced one at a time, each once its jobs have ended.
    """
    with client() as api:
        declared = api.clusters.get(name).spec.model_dump(mode="json")
        applied, changed = apply_spec(api.clusters, parse_cluster({**declared, "image": image}))
        found = applied.cluster
        if not as_json:
            tell(applied, changed)
        if wait:
            (found,) = wait_until_up(api.clusters, [name], timeout)
    if as_json:
        print_json(found)


@click.command()
@name_argument
@wait_options("all machines have ended")
@json_option
def drain(name: str, wait: bool, timeout: float, as_json: bool) -> None:
    """Let all machines of the cluster NAME end with their jobs. It stays declared."""
    with client() as api:
        found = api.clusters.drain(name)
        if not as_json:
            echo(f"{name} is draining: {_running(found)}")
        if wait:
            found = wait_until_empty(api.clusters, found, timeout) or found
    if as_json:
        print_json(found)


@click.command()
@name_argument
@json_option
def resume(name: str, as_json: bool) -> None:
    """Start the machines of the cluster NAME again after `drain`."""
    with client() as api:
        found = api.clusters.resume(name)
    if as_json:
        print_json(found)
        return
    echo(f"{name} goes on: {machines(found.target)} wanted, {found.up} UP")


@click.command()
@name_argument
@wait_options("all machines are UP")
@json_option
def retry(name: str, wait: bool, timeout: float, as_json: bool) -> None:
    """Try again at once what has failed in the cluster NAME.

    Failures of its images are forgotten, machines that wait for another try are made anew, and a
    declaration that the cluster went back from is declared again.
    """
    with client() as api:
        before = api.clusters.get(name)
        found = api.clusters.retry(name)
        if not as_json:
            again = f"generation {before.failed.generation} is declared again" if before.failed else ""
            echo(f"{name} tries again" + (f": {again}" if again else ""))
        if wait:
            (found,) = wait_until_up(api.clusters, [name], timeout)
    if as_json:
        print_json(found)


@click.command()
@name_argument
@click.option("--drain", "mode", flag_value="drain", help="Let running jobs end first (default).")
@click.option("--now", "mode", flag_value="now", help="End all machines at once, with their jobs.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@wait_options("the cluster and all of its machines have gone")
@json_option
def delete(name: str, mode: str | None, yes: bool, wait: bool, timeout: float, as_json: bool) -> None:
    """Have the cluster NAME gone, with all of its machines.

    Where machines are up and it is not said how they are to end, this asks.
    """
    with client() as api:
        before = api.clusters.get(name)
        if mode is None and not yes and _up(before):
            question = f"{name}: {_running(before)}. Delete it once its jobs have ended?"
            click.confirm(question, abort=True, err=True)
        found = api.clusters.delete(name, "now" if mode == "now" else "drain")
        if not as_json:
            ending = "at once" if mode == "now" else "once their jobs have ended"
            left = len(there(found))
            echo(f"{name} is deleted" + (f"; {machines(left)} will go {ending}" if left else ""))
        if wait:
            wait_until_empty(api.clusters, found, timeout)
    if as_json:
        print_json(found)


def _up(cluster: Cluster) -> int:
    return sum(member.state is MemberState.UP or member.busy for member in cluster.members)


def _running(cluster: Cluster) -> str:
    busy = sum(member.busy for member in cluster.members)
    return f"{machines(_up(cluster))} up, {busy} of them with jobs"
