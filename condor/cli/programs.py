"""Commands that run programs of the execute node: ``exec-unchanged`` and ``node ad``."""

from __future__ import annotations

import click

from condor.node import exec_transparent, startd_cron


@click.command("exec-unchanged", hidden=True, context_settings={"ignore_unknown_options": True})
@click.option("--environment", required=True, help="File with the job's variables.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_unchanged(environment: str, command: tuple[str, ...]) -> None:
    """Run a transparent job; /usr/libexec/vmjobs/exec-unchanged is ten times as fast."""
    exec_transparent.main(environment, command)  # job wrappers of earlier releases start it


@click.command()
@click.option(
    "--follow", is_flag=True, help="Print them again when they may have changed, until killed."
)
def ad(*, follow: bool) -> None:
    """Print this node's machine ad attributes, for HTCondor's STARTD_CRON.

    --follow reports at once that an agent has ended, and within a second that one has started.
    """
    startd_cron.main(follow=follow)
