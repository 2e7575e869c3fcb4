"""``vmjobs job out``, ``err`` and ``console``."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from vmjobs.cli.common import CONDOR_ID, client
from vmjobs.errors import Unavailable
from vmjobs.model import StreamName
from vmjobs.terminal import guest_output

_job = click.argument("job")
_follow = click.option("-f", "--follow", is_flag=True, help="Follow until the job has ended.")
_offset = click.option(
    "--offset", type=click.IntRange(0, 10**15 - 1), default=0, show_default=True, help="First byte."
)


def _print(job: str, name: StreamName, follow: bool, offset: int) -> None:
    api = client()
    chunks = api.follow(job, name, offset) if follow else api.stream(job, name, offset)
    sink = guest_output(sys.stdout.buffer)
    for chunk in chunks:
        sink.write(chunk)
        sink.flush()


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
@click.option("--schedd", default="", metavar="NAME", help="The schedd of an HTCondor job.")
@click.option("--pool", default="", metavar="COLLECTOR", help="The pool of an HTCondor job.")
def console(job: str, follow: bool, offset: int, schedd: str, pool: str) -> None:
    """Print the serial console of JOB's VM, from its first byte on.

    JOB may also be a running HTCondor job with VMJobImage: CLUSTER or CLUSTER.PROC.
    """
    if CONDOR_ID.fullmatch(job):
        _print_condor_console(job, follow, offset, schedd, pool)
    else:
        _print(job, StreamName.CONSOLE, follow, offset)


def _print_condor_console(job: str, follow: bool, offset: int, schedd: str, pool: str) -> NoReturn:
    """Run condor_ssh_to_job; on the node, ``vmjobs enter`` prints the console."""
    wanted = ["vmjobs-console", *(["--offset", str(offset)] if offset else []), *(["-f"] * follow)]
    where = [*(["-name", schedd] if schedd else []), *(["-pool", pool] if pool else [])]
    argv = ["condor_ssh_to_job", "-auto-retry", *where, job, " ".join(wanted)]
    sys.stdout.flush()
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell
    except OSError as error:
        raise Unavailable(
            "schedd", f"cannot run {argv[0]}: {error.strerror}", hint="run this on a host of the pool"
        ) from error
