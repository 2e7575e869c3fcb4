"""``vmjobs gateway ssh``: runs OpenSSH's ssh over the gateway's supervisor."""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from node.cli.gateway.common import find_gateway, gateway_options, select_vms
from vmjobs.cli.cluster.ssh import (
    KEY_FILE,
    KNOWN_HOSTS_FILE,
    make_key,
    openssh_options,
    run_openssh,
    split_ssh_arguments,
)
from vmjobs.gateway.control import SupervisorClient
from vmjobs.gateway.directory import GatewayDirectory


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@gateway_options
@click.argument("words", metavar="[SSH-OPTIONS] VM [--] [COMMAND]...", nargs=-1, type=click.UNPROCESSED)
def ssh(words: tuple[str, ...], name: str | None, state_dir: Path | None) -> None:
    """Log in to VM as root, or run COMMAND in it and exit with its status.

    `-t ui -- su - ada` opens a shell of a user. ssh is OpenSSH's; its options go
    before VM. It needs no open port.
    """
    options, vm, command = split_ssh_arguments(words)
    with open_login(find_gateway(name, state_dir), vm) as login:
        status = run_openssh(["ssh", *login, *options, "--", vm, *command])
    sys.exit(status)


@contextmanager
def open_login(place: GatewayDirectory, vm: str) -> Iterator[list[str]]:
    """Yield options with which OpenSSH reaches a VM as root, once; then delete the key.

    Raises:
        NotFound: there is no such VM. Unavailable: no supervisor runs. ConfigError: no OpenSSH.
    """
    select_vms(place.installed().gateway, [vm])
    SupervisorClient(place.control).close()  # reports a missing supervisor before ssh does
    with tempfile.TemporaryDirectory(prefix="vmjobs-ssh-") as folder:
        make_key(Path(folder))
        connect = ["gateway", "connect", str(place.directory), vm, folder]
        login = openssh_options(vm, "root", Path(folder), connect)
        yield [*login, "-o", "ProxyUseFdpass=yes"]


@click.command(hidden=True)
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("vm", metavar="VM")
@click.argument("folder", type=click.Path(path_type=Path))
def connect(directory: Path, vm: str, folder: Path) -> None:
    """Pass ssh, which runs this command, a connection to the VM's SSH server."""
    public = (folder / KEY_FILE).with_suffix(".pub").read_text("ascii").strip()
    with SupervisorClient(GatewayDirectory(directory).control) as control:
        host_key, connection = control.log_in(vm, public)
    (folder / KNOWN_HOSTS_FILE).write_text(f"{vm} {host_key}\n", "ascii")
    with connection, socket.socket(fileno=sys.stdout.fileno()) as ours:
        socket.send_fds(ours, [b"\0"], [connection.fileno()])
        ours.detach()
