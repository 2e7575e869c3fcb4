"""``vmjobs node``: execute nodes, as the API knows them and as this one describes itself."""

from __future__ import annotations

import socket
from pathlib import Path

import click

from vmjobs.agent import protocol
from vmjobs.cli.support import ago, client, config, json_option, print_json, print_table
from vmjobs.model import Node

#: A node under full load is slow to answer, and must not lose its jobs for that.
ANSWER_SECONDS = 60


@click.group()
def node() -> None:
    """Look at execute nodes."""


@node.command("list")
@json_option
def list_nodes(as_json: bool) -> None:
    """List the nodes that announced themselves."""
    nodes = client().nodes()
    if as_json:
        print_json(list(nodes))
        return
    rows = [
        (
            n.name,
            ", ".join(h.kind for h in n.hypervisors if h.works) or "none",
            n.cpus,
            f"{n.memory} MiB",
            len(n.running),
            len(n.images),
            ago(n.updated),
        )
        for n in nodes
    ]
    print_table(("NODE", "HYPERVISORS", "CPUS", "MEMORY", "JOBS", "IMAGES", "HEARD"), rows)


@node.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show one node: what its probes found, what it caches and runs."""
    found = client().node(name)
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
            ("heard", ago(found.updated)),
            *(("image", digest) for digest in found.images),
            *(("job", job) for job in found.running),
        ],
    )
    rows = [
        (h.kind, "works" if h.works else "fails", f"{h.seconds:.1f} s", h.detail)
        for h in found.hypervisors
    ]
    print_table(("HYPERVISOR", "PROBE", "TOOK", "DETAIL"), rows)


@node.command()
def ad() -> None:
    """Print this node's machine ad attributes, for HTCondor's STARTD_CRON."""
    from condor import machine_ad  # noqa: PLC0415 - only the execute node needs it

    described = _ask_agent(config().socket)
    click.echo(machine_ad.lines(described) if described else machine_ad.absent(), nl=False)


def _ask_agent(path: Path) -> Node | None:
    """What the agent says of its node; None where there is no agent."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(str(path))
            protocol.send(connection, protocol.StatusMessage())
            for message in protocol.receive(connection):
                if isinstance(message, protocol.StatusMessage):
                    return message.node
    except OSError:
        return None
    return None
