"""``vmjobs gateway worker``: execute nodes of the site in the pool of a gateway."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import click
from pydantic import TypeAdapter, ValidationError

from condor.gateway import GatewayKit
from condor.gateway_nodes import (
    ACCOUNTS_PREFIX,
    NODE_PREFIX,
    NODE_TOKEN_FILE,
    new_node,
    node_accounts,
    node_files,
    node_names,
    nodes_script,
)
from node.cli.gateway.common import find_gateway, gateway_options
from node.cli.gateway.ssh import open_login
from vmjobs.cli.common import echo, json_option, print_json, print_table
from vmjobs.cluster.vm_state import Phase
from vmjobs.errors import Conflict, InvalidRequest, NotFound, Unavailable
from vmjobs.file_lock import file_lock
from vmjobs.gateway.archive import replace_file
from vmjobs.gateway.directory import GatewayDirectory
from vmjobs.gateway.spec import Domain, Gateway, GatewayRole
from vmjobs.subprocess import run

_NODE_NAME: Final[TypeAdapter[str]] = TypeAdapter(Domain)
#: Seconds for the computing element to take a changed list of nodes.
UPDATE_SECONDS: Final = 120.0

_node_argument = click.argument("node", metavar="NODE")


@click.command()
@_node_argument
@gateway_options
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for the files.  [default: NODE, here]",
)
@click.option(
    "--account",
    "accounts",
    multiple=True,
    metavar="PERSON",
    help="Run this person's jobs as the node's account of the same name. May be repeated.",
)
def add(
    node: str, name: str | None, state_dir: Path | None, output: Path | None, accounts: tuple[str, ...]
) -> None:
    """Let NODE join the pool, and write the two files with which its HTCondor does so.

    NODE is its full host name. Repeat it for a new token, which is valid for a year. It keeps the
    accounts that it has, unless others are given.
    """
    place = find_gateway(name, state_dir)
    gateway = place.installed().gateway
    _check_name(gateway, node)
    folder = output or Path(node)
    with _lock(place):
        secrets = place.secrets()
        new = {key: value for key, value in new_node(node).items() if key not in secrets}
        chosen = accounts or [who for who in node_accounts(node, secrets) if who in gateway.people]
        new[ACCOUNTS_PREFIX + node] = " ".join(chosen).encode()
        secrets |= new
        token = GatewayKit().node_token(gateway, node, secrets).token
        files = node_files(gateway, node, token, chosen)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.save_secrets(new)
        for file, content in files.items():
            with replace_file(folder / file) as target:
                target.write(content)
        _update(place, gateway)
    config = next(file for file in files if file != NODE_TOKEN_FILE)
    echo(f"{node} may join the pool of {gateway.name}. There, as root:")
    echo(f"  install -m 0644 {folder}/{config} /etc/condor/config.d/")
    echo(f"  install -m 0600 {folder}/{NODE_TOKEN_FILE} /etc/condor/tokens.d/gateway-{gateway.name}")
    echo("  systemctl restart condor")
    echo(f"Accounts of jobs there: {', '.join([*chosen, 'nobody'])}")


@click.command()
@_node_argument
@gateway_options
def remove(node: str, name: str | None, state_dir: Path | None) -> None:
    """Refuse NODE and its token from now on. Its jobs run again elsewhere."""
    place = find_gateway(name, state_dir)
    gateway = place.installed().gateway
    _check_name(gateway, node)
    with _lock(place):
        known = node_names(place.secrets())
        place.remove_secret(NODE_PREFIX + node)
        place.remove_secret(ACCOUNTS_PREFIX + node)
        _update(place, gateway, node)  # an earlier command may have been killed before this
    if node not in known:
        listing = ", ".join(known) or "none"
        raise NotFound(f"{node} is no node of {gateway.name}", hint=f"its nodes: {listing}")
    echo(f"{node} is no longer in the pool of {gateway.name}")


@click.command("list")
@gateway_options
@json_option
def list_nodes(name: str | None, state_dir: Path | None, as_json: bool) -> None:
    """List the nodes that may be in the pool."""
    secrets = find_gateway(name, state_dir).secrets()
    nodes = {node: node_accounts(node, secrets) for node in node_names(secrets)}
    if as_json:
        print_json({"nodes": list(nodes), "accounts": nodes})
    else:
        print_table(["NODE", "ACCOUNTS"], [[node, " ".join(nodes[node])] for node in nodes])


def _check_name(gateway: Gateway, node: str) -> None:
    try:
        _NODE_NAME.validate_python(node)
    except ValidationError:
        raise InvalidRequest(
            f"{node!r} is not a full host name", hint="such as wn7.example.org, in small letters"
        ) from None
    if node in map(gateway.fqdn, gateway.machines):
        raise Conflict(f"{node} is a VM of {gateway.name}")


def _lock(place: GatewayDirectory) -> AbstractContextManager[int]:
    busy = Conflict("another command changes the nodes of this gateway")
    return file_lock(place.directory / "nodes.lock", busy, UPDATE_SECONDS)


def _update(place: GatewayDirectory, gateway: Gateway, removed: str = "") -> None:
    """Let the computing element accept the present nodes: now, or when it boots."""
    script = nodes_script(gateway, place.secrets(), removed)
    records = place.records()
    for vm in gateway.of_role(GatewayRole.COMPUTING_ELEMENT):
        record = records.get(vm.name)
        if record is None or record.phase in (Phase.GONE, Phase.WAITING):
            continue
        with open_login(place, vm.name) as login:
            argv = ["ssh", *login, "--", vm.name, script]
            done = run(argv, timeout=UPDATE_SECONDS, check=False)
        if done.returncode != 0:
            why = done.stderr.decode("utf-8", "replace").strip()
            raise Unavailable(
                "pool",
                f"{vm.name} cannot take the list of nodes: {why}",
                hint="once it is up, repeat the command",
            )
