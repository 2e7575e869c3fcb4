"""``vmjobs node list`` and ``show``: the execute nodes that the service knows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from vmjobs.cli.common import client, format_age, json_option, print_json, print_table
from vmjobs.cluster.vm_state import ClusterVmState
from vmjobs.errors import Forbidden, NotFound
from vmjobs.model import Node

if TYPE_CHECKING:
    from vmjobs.client import Client


@click.command("list")
@json_option
def list_nodes(as_json: bool) -> None:
    """List the nodes that announced themselves."""
    with client() as api:
        nodes = api.nodes()
        usage = {} if as_json else _cluster_usage(api, nodes)
    if as_json:
        print_json(nodes)
        return
    rows = [
        (
            n.name,
            "none: it rests" if n.fault else _working_kinds(n) or "none",
            n.cpus,
            f"{n.memory} MiB",
            len(n.running),
            len(n.images),
            _cluster_usage_text(n, usage),
            format_age(n.updated),
        )
        for n in nodes
    ]
    columns = ("NODE", "HYPERVISORS", "CPUS", "MEMORY", "JOBS", "IMAGES", "FOR CLUSTERS", "HEARD")
    print_table(columns, rows)


@click.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show one node: its probe results, cached images, jobs and cluster VMs."""
    with client() as api:
        found = api.node(name)
        usage = {} if as_json else _cluster_usage(api, [found])
    if as_json:
        print_json(found)
        return
    print_table(
        ("", ""),
        [
            ("node", found.name),
            ("site", found.site),
            ("version", found.version),
            ("cpus", found.cpus),
            ("memory", f"{found.memory} MiB"),
            ("disk", f"{found.disk} MiB free"),
            ("for clusters", _cluster_usage_text(found, usage)),
            ("heard", format_age(found.updated)),
            *([("takes no jobs", found.fault)] if found.fault else []),
            *(("image", digest) for digest in found.images),
            *(("job", job) for job in found.running),
            *(("cluster VM", name) for name in (usage or {}).get(found.name, _ClusterUsage()).vms),
        ],
    )
    rows = [
        (h.kind, "works" if h.works else "fails", f"{h.seconds:.1f} s", h.detail)
        for h in found.hypervisors
    ]
    print_table(("HYPERVISOR", "PROBE", "TOOK", "DETAIL"), rows)


def _working_kinds(node_info: Node) -> str:
    return ", ".join(h.kind for h in node_info.hypervisors if h.works)


@dataclass
class _ClusterUsage:
    """Resources of a node that cluster VMs use; memory in MiB. vms: their names."""

    cpus: int = 0
    memory: int = 0
    vms: list[str] = field(default_factory=list)


def _cluster_usage(api: Client, nodes: Sequence[Node]) -> dict[str, _ClusterUsage] | None:
    """Return what cluster VMs use, by node; None if the user may not see clusters."""
    found: dict[str, _ClusterUsage] = defaultdict(_ClusterUsage)
    if not any(n.cluster_memory for n in nodes):
        return found
    try:
        clusters = [api.clusters.get(cluster.name) for cluster in api.clusters.list()]
    except (Forbidden, NotFound):
        return None
    for cluster in clusters:
        for vm in cluster.members:
            if vm.node and vm.state is not ClusterVmState.GONE:
                usage = found[vm.node]
                usage.cpus += cluster.spec.cpus
                usage.memory += cluster.spec.memory
                usage.vms.append(vm.name)
    return found


def _cluster_usage_text(node_info: Node, usage: dict[str, _ClusterUsage] | None) -> str:
    if not node_info.cluster_memory:
        return "-"
    if usage is None:
        return f"{node_info.cluster_cpus} cpus, {node_info.cluster_memory} MiB"
    now = usage.get(node_info.name, _ClusterUsage())
    return (
        f"{now.cpus} of {node_info.cluster_cpus} cpus, {now.memory} of {node_info.cluster_memory} MiB"
    )
