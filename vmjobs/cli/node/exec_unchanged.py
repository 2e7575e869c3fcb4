"""``vmjobs exec-unchanged``: the command that job wrappers of earlier releases start."""

from __future__ import annotations

import click


@click.command("exec-unchanged", hidden=True, context_settings={"ignore_unknown_options": True})
@click.option("--environment", required=True, help="File with the job's variables.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_unchanged(environment: str, command: tuple[str, ...]) -> None:
    """Run a transparent job; /usr/libexec/vmjobs/exec-unchanged is ten times as fast."""
    from condor.node.exec_transparent import main  # noqa: PLC0415 - only the execute node needs it

    main(environment, command)
