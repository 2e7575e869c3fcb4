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
    print_items(columns, [_row(member, found) for member in found.members])


def _status_text(cluster: Cluster) -> str:
    if cluster.deleting or cluster.draining:
        return "deleting" if cluster.deleting else "draining"
    return f"generation {cluster.failed.generation} failed" if cluster.failed else ""


def _header(cluster: Cluster) -> list[tuple[str, str]]:
    spec = cluster.spec
    where = [f"nodes {', '.join(spec.nodes)}"] if spec.nodes else []
    where += [f"site {spec.site}"] if spec.site else []
    machine = [
        f"{spec.cpus} cpu{'s' * (spec.cpus > 1)}",
        f"{spec.memory} MiB",
        f"{spec.disk} MiB for jobs",
    ]
    machine += [f"only on {spec.hypervisor}"] if spec.hypervisor else []
    doing = _status_text(cluster)
    return [
        ("cluster", cluster.name + (f" ({doing})" if doing else "")),
        ("owner", cluster.owner),
        ("image", spec.image),
        ("sha256", cluster.image.removeprefix("sha256:")),  # the prefix would not fit 80 columns
        ("generation", f"{cluster.generation}, of {format_age(cluster.updated)}"),
        *_failure_rows(cluster),
        ("VMs", f"{cluster.up} UP of {cluster.target} (size {format_size(spec.size)})"),
        ("each", ", ".join(machine)),
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


def _row(member: ClusterVm, cluster: Cluster) -> tuple[str, ...]:
    image = short_digest(member.image)
    old = member.generation != cluster.generation
    return (
        member.name,
        member.node or "-",
        member.state,
        format_age(member.up_since or member.since).removesuffix(" ago"),
        f"{member.jobs}, busy" if member.busy else str(member.jobs),
        member.hypervisor or "-",
        f"{image} (generation {member.generation})" if old else image,
        member.system or "-",
        _reason_cell(member),
    )


def _reason_cell(member: ClusterVm) -> str:
    again = max(0, int((member.retry - now()).total_seconds())) if member.retry else None
    return format_reason(member) + (f" (again in {again} s)" if again is not None else "")
