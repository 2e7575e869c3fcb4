"""``vmjobs gateway ssh``: runs OpenSSH's ssh over the gateway's supervisor."""

from __future__ import annotations

import socket
import sys
import tempfile
from pathlib import Path

import click

from vmjobs.cli.cluster_ssh import KEY, KNOWN_HOSTS, make_key, options_for, run_openssh, split
from vmjobs.cli.gateway_support import chosen, gateway_options, place_of
from vmjobs.gateway.control import Control
from vmjobs.gateway.place import GatewayPlace


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@gateway_options
@click.argument(
    "words", metavar="[SSH-OPTIONS] MACHINE [--] [COMMAND]...", nargs=-1, type=click.UNPROCESSED
)
def ssh(words: tuple[str, ...], name: str | None, state_dir: Path | None) -> None:
    """Log in to MACHINE as root, or run COMMAND in it and exit with its status.

    `-t ui -- su - physicist` opens a shell of the gateway's users. ssh is OpenSSH's; its options go
    before MACHINE. It needs no open port.
    """
    options, machine, command = split(words)
    place = place_of(name, state_dir)
    chosen(place.installed(), [machine])
    Control(place.control).close()  # reports a missing supervisor before ssh does
    with tempfile.TemporaryDirectory(prefix="vmjobs-ssh-") as folder:
        make_key(Path(folder))
        connect = ["gateway", "connect", str(place.directory), machine, folder]
        login = options_for(machine, "root", Path(folder), connect)
        login += ["-o", "ProxyUseFdpass=yes"]
        status = run_openssh(["ssh", *login, *options, "--", machine, *command])
    sys.exit(status)


@click.command(hidden=True)
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("machine")
@click.argument("folder", type=click.Path(path_type=Path))
def connect(directory: Path, machine: str, folder: Path) -> None:
    """Pass ssh, which runs this command, a connection to the VM's SSH server."""
    public = (folder / KEY).with_suffix(".pub").read_text("ascii").strip()
    with Control(GatewayPlace(directory).control) as control:
        host_key, connection = control.log_in(machine, public)
    (folder / KNOWN_HOSTS).write_text(f"{machine} {host_key}\n", "ascii")
    with connection, socket.socket(fileno=sys.stdout.fileno()) as ours:
        socket.send_fds(ours, [b"\0"], [connection.fileno()])
        ours.detach()
