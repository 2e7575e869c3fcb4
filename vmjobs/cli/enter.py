"""``vmjobs enter``: what brings ``condor_ssh_to_job`` into a job's machine."""

from __future__ import annotations

import os
import sys

import click

from vmjobs.cli.support import config


@click.command()
def enter() -> None:
    """Open a shell in the machine of the HTCondor job that this belongs to.

    This runs on the execute node, below the job's starter: where `condor_ssh_to_job` brings you. With
    SSH_ORIGINAL_COMMAND in the environment, as an SSH server sets it, that is run instead, and its exit
    status is this command's. `vmjobs-console [--offset N] [-f]` is no command of the machine: it shows
    the machine's console.
    """
    from vmjobs import enter as ways  # noqa: PLC0415

    command, socket = os.environ.get("SSH_ORIGINAL_COMMAND", ""), config().socket
    if found := ways.CONSOLE.fullmatch(command.strip()):
        sys.exit(ways.watch(socket, int(found[1] or 0), follow=bool(found[2])))
    sys.exit(ways.enter(socket, command))
