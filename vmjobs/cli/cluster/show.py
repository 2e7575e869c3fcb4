"""``vmjobs cluster list`` and ``show``."""

from __future__ import annotations

import click

from vmjobs.cli.cluster.common import format_reason, format_size, name_argument, short_digest
from vmjobs.cli.common import client, format_age, json_option, print_items, print_json, print_table
from vmjobs.cluster.wire import Cluster, ClusterVm
from vmjobs.model import now


@click.command("list")
@json_option
def list_clusters(as_json: bool) -> None:
    """List all virtual clusters."""
    with client() as api:
        found = api.clusters.list()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            c.name,
            c.spec.image,
            format_size(c.spec.size),
            c.target,
            c.up,
            _status_text(c),
            c.owner,
            format_age(c.updated),
        )
        for c in found
    ]
    print_table(("CLUSTER", "IMAGE", "SIZE", "TARGET", "UP", "", "OWNER", "CHANGED"), rows)


@click.command()
@name_argument
@json_option
def show(name: str, as_json: bool) -> None:
    """Show the cluster NAME and its VMs."""
    with client() as api:
        found = api.clusters.get(name)
    if as_json:
        print_json(found)
        return
    print_table(("", ""), _header(found))
    columns = ("NAME", "NODE", "STATE", "FOR", "JOBS", "VM", "IMAGE", "SYSTEM", "REASON")
    print_items(columns, [_row(vm, found) for vm in found.members])


def _status_text(cluster: Cluster) -> str:
    if cluster.deleting or cluster.draining:
        return "deleting" if cluster.deleting else "draining"
    return f"generation {cluster.failed.generation} failed" if cluster.failed else ""


def _header(cluster: Cluster) -> list[tuple[str, str]]:
    spec = cluster.spec
    where = [f"nodes {', '.join(spec.nodes)}"] if spec.nodes else []
    where += [f"site {spec.site}"] if spec.site else []
    per_vm = [
        f"{spec.cpus} cpu{'s' * (spec.cpus > 1)}",
        f"{spec.memory} MiB",
        f"{spec.disk} MiB for jobs",
    ]
    per_vm += [f"only on {spec.hypervisor}"] if spec.hypervisor else []
    doing = _status_text(cluster)
    return [
        ("cluster", cluster.name + (f" ({doing})" if doing else "")),
        ("owner", cluster.owner),
        ("image", spec.image),
        ("sha256", cluster.image.removeprefix("sha256:")),  # the prefix would not fit 80 columns
        ("generation", f"{cluster.generation}, of {format_age(cluster.updated)}"),
        *_failure_rows(cluster),
        ("VMs", f"{cluster.up} UP of {cluster.target} (size {format_size(spec.size)})"),
        ("each", ", ".join(per_vm)),
        ("where", "; ".join(where) or "any node"),
        ("pool", spec.pool or "the service's first"),
        ("start", spec.start),
        *(("attribute", f"{key} = {value}") for key, value in spec.attributes.items()),
    ]


def _failure_rows(cluster: Cluster) -> list[tuple[str, str]]:
    found = [("guard", guard.message) for guard in cluster.guards]
    if cluster.failed:
        text = (
            f"{cluster.failed.message}; {format_age(cluster.failed.since)}, {cluster.failed.spec.image}"
        )
        found.insert(0, ("failed", text))
    return found


def _row(vm: ClusterVm, cluster: Cluster) -> tuple[str, ...]:
    image = short_digest(vm.image)
    old = vm.generation != cluster.generation
    return (
        vm.name,
        vm.node or "-",
        vm.state,
        format_age(vm.up_since or vm.since).removesuffix(" ago"),
        f"{vm.jobs}, busy" if vm.busy else str(vm.jobs),
        vm.hypervisor or "-",
        f"{image} (generation {vm.generation})" if old else image,
        vm.system or "-",
        _reason_cell(vm),
    )


def _reason_cell(vm: ClusterVm) -> str:
    again = max(0, int((vm.retry - now()).total_seconds())) if vm.retry else None
    return format_reason(vm) + (f" (again in {again} s)" if again is not None else "")
