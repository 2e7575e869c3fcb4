"""``vmjobs gateway``: a grid gateway on this machine, for those who operate it."""

from __future__ import annotations

import click

from vmjobs.cli.verbs import Verbs

#: verb -> (module, attribute, one line of help).
VERBS = {
    "validate": ("vmjobs.cli.gateway_install", "validate", "Say what is wrong with a declaration."),
    "install": ("vmjobs.cli.gateway_install", "install", "Have images, disks and keys of a gateway."),
    "boot": ("vmjobs.cli.gateway_life", "boot", "Have machines run, and wait until they are up."),
    "stop": ("vmjobs.cli.gateway_life", "stop", "Shut machines down."),
    "show": ("vmjobs.cli.gateway_show", "show", "Show a gateway and its machines."),
    "console": ("vmjobs.cli.gateway_show", "console", "Print the console of a machine."),
    "ssh": ("vmjobs.cli.gateway_ssh", "ssh", "Log in to a machine, or run a command in it."),
    "connect": ("vmjobs.cli.gateway_ssh", "connect", ""),
    "run": ("vmjobs.cli.gateway_life", "run", "Look after the machines in the foreground."),
    "backup": ("vmjobs.cli.gateway_backup", "backup", "Copy a whole gateway into one file."),
    "restore": ("vmjobs.cli.gateway_backup", "restore", "Have a gateway as a backup has it."),
    "delete": ("vmjobs.cli.gateway_life", "delete", "Have a gateway gone, with all that it kept."),
}


@click.command(cls=Verbs, verbs=VERBS)
def gateway() -> None:
    """Run a grid gateway: a small site's servers as machines of this one, on a network of their own.

    It needs no service, no scheduler and no root rights. Its machines go on whatever becomes of these
    commands; what they keep outlives their restarts.
    """
