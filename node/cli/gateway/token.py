"""``vmjobs gateway token``: for people who submit from other hosts."""

from __future__ import annotations

from pathlib import Path

import click

from node.cli.gateway.common import find_gateway, gateway_options, role_kit
from vmjobs.cli.common import echo


@click.command()
@click.argument("person", metavar="PERSON")
@gateway_options
def token(person: str, name: str | None, state_dir: Path | None) -> None:
    """Print a token (IDTOKEN) for PERSON, to be used on another host.

    It belongs into a file in `~/.condor/tokens.d` there. For thirty days PERSON may submit jobs to the
    computing element with it, and read its pool.
    """
    place = find_gateway(name, state_dir)
    echo(role_kit().person_token(place.installed().gateway, person, place.secrets()).token)
