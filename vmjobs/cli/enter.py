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
    status is this command's.
    """
    from vmjobs.enter import enter as go  # noqa: PLC0415

    sys.exit(go(config().socket, os.environ.get("SSH_ORIGINAL_COMMAND", "")))
