"""``vmjobs gateway token``: for users of the gateway on other hosts."""

from __future__ import annotations

from pathlib import Path

import click

from node.cli.gateway.common import find_gateway, gateway_options, role_kit
from vmjobs.cli.common import echo


@click.command()
@gateway_options
def token(name: str | None, state_dir: Path | None) -> None:
    """Print a token (IDTOKEN) for a user on another host.

    It is for `~/.condor/tokens.d` there. With it, jobs may be submitted to the computing element as
    `physicist`, and its pool be read, for thirty days.
    """
    place = find_gateway(name, state_dir)
    echo(role_kit().user_token(place.installed().gateway, place.secrets()).token)
