"""``vmjobs gateway``: commands for operators of a grid gateway on this host."""

from __future__ import annotations

import click

from vmjobs.cli.lazy_commands import LazyGroup

#: subcommand -> (module, attribute, one line of help).
SUBCOMMANDS = {
    "validate": ("vmjobs.cli.gateway.install", "validate", "Check a declaration for faults."),
    "install": ("vmjobs.cli.gateway.install", "install", "Make a gateway's images, disks and keys."),
    "boot": ("vmjobs.cli.gateway.lifecycle", "boot", "Start machines, and wait until they are up."),
    "stop": ("vmjobs.cli.gateway.lifecycle", "stop", "Shut machines down."),
    "show": ("vmjobs.cli.gateway.show", "show", "Show a gateway and its machines."),
    "console": ("vmjobs.cli.gateway.show", "console", "Print the console of a machine."),
    "ssh": ("vmjobs.cli.gateway.ssh", "ssh", "Log in to a machine, or run a command in it."),
    "connect": ("vmjobs.cli.gateway.ssh", "connect", ""),
    "run": ("vmjobs.cli.gateway.lifecycle", "run", "Supervise the machines in the foreground."),
    "backup": ("vmjobs.cli.gateway.backup", "backup", "Copy a whole gateway into one file."),
    "restore": ("vmjobs.cli.gateway.backup", "restore", "Restore a gateway from a backup."),
    "delete": ("vmjobs.cli.gateway.lifecycle", "delete", "Delete a gateway with all of its data."),
}


@click.command(cls=LazyGroup, lazy_commands=SUBCOMMANDS)
def gateway() -> None:
    """Run a grid gateway: a small site's servers as VMs on a private network.

    It needs no service, no scheduler and no root rights. Its machines are VMs of this host: they keep
    running when these commands end, and keep their data over restarts.
    """
