"""``vmjobs completion``: tab completion for the user's shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from vmjobs.cli.common import echo


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print completion code: eval "$(vmjobs completion bash)"."""
    from vmjobs.cli.main import cli  # noqa: PLC0415 - main imports this module

    found = get_completion_class(shell)
    assert found is not None  # noqa: S101 - the choice above allows nothing else
    echo(found(cli, {}, "vmjobs", "_VMJOBS_COMPLETE").source())
