"""``vmjobs job out``, ``err`` and ``console``."""

from __future__ import annotations

import sys

import click

from vmjobs.cli.support import client
from vmjobs.model import StreamName

_job = click.argument("job")
_follow = click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
_offset = click.option(
    "--offset", type=click.IntRange(min=0), default=0, show_default=True, help="First byte."
)


def _print(job: str, name: StreamName, follow: bool, offset: int) -> None:
    api = client()
    chunks = api.follow(job, name, offset) if follow else api.stream(job, name, offset)
    for chunk in chunks:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


@click.command()
@_job
@_follow
@_offset
def out(job: str, follow: bool, offset: int) -> None:
    """Print the standard output of JOB's script."""
    _print(job, StreamName.OUT, follow, offset)


@click.command()
@_job
@_follow
@_offset
def err(job: str, follow: bool, offset: int) -> None:
    """Print the standard error of JOB's script."""
    _print(job, StreamName.ERR, follow, offset)


@click.command()
@_job
@_follow
@_offset
def console(job: str, follow: bool, offset: int) -> None:
    """Print the serial console of JOB's VM, from its first byte on."""
    _print(job, StreamName.CONSOLE, follow, offset)
