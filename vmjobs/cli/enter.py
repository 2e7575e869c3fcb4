"""``vmjobs enter``: connects ``condor_ssh_to_job`` to a job's VM."""

from __future__ import annotations

import os
import sys

import click

from vmjobs import job_shell
from vmjobs.cli.common import config


@click.command()
def enter() -> None:
    """Open a shell in the VM of the HTCondor job that this process belongs to.

    It runs on the execute node, below the job's starter, where `condor_ssh_to_job` starts it. If an SSH
    server has set SSH_ORIGINAL_COMMAND, that command runs instead, and its status is the exit status.
    `vmjobs-console [--offset N] [-f]` does not run in the VM: it prints the VM's console.
    """
    command, socket = os.environ.get("SSH_ORIGINAL_COMMAND", ""), config().socket
    if found := job_shell.CONSOLE_COMMAND.fullmatch(command.strip()):
        sys.exit(job_shell.print_console(socket, int(found[1] or 0), follow=bool(found[2])))
    sys.exit(job_shell.run_shell(socket, command))
