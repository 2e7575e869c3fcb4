"""``vmjobs token``: bearer tokens from the built-in issuer."""

from __future__ import annotations

import os
from pathlib import Path

import click

from api.serve import make_issuer
from api.tokens import USER_SCOPES, Scope
from vmjobs.cli.support import config, echo


@click.group()
def token() -> None:
    """Make bearer tokens (on the API's host)."""


def _hand_out(text: str, file: Path | None) -> None:
    if file is None:
        echo(text)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as sink:
        os.fchmod(handle, 0o600)  # it may have been there before
        sink.write(text + "\n")


_lifetime = click.option(
    "--days", type=click.FloatRange(min=0.0007), default=30.0, show_default=True, help="Lifetime."
)
_file = click.option(
    "--file", type=click.Path(path_type=Path), help="Write it there (0600), not to stdout."
)


@token.command()
@click.argument("subject")
@click.option("--group", "groups", multiple=True, help="A group that SUBJECT is in; may be repeated.")
@click.option(
    "--admin", is_flag=True, help="May also operate clusters, publish library images, collect garbage."
)
@_lifetime
@_file
def user(subject: str, groups: tuple[str, ...], admin: bool, days: float, file: Path | None) -> None:
    """A token with which SUBJECT submits jobs and looks after them, and after images."""
    scopes = USER_SCOPES | {Scope.ADMIN} if admin else USER_SCOPES
    made = make_issuer(config()).user_token(subject, scopes, days * 86400, groups)
    _hand_out(made, file)


@token.command()
@click.argument("pool")
@_lifetime
@_file
def rooster(pool: str, days: float, file: Path | None) -> None:
    """A token with which the condor_rooster of POOL has clusters wake that sleep."""
    _hand_out(make_issuer(config()).rooster_token(pool, lifetime=days * 86400), file)


@token.command()
@click.argument("name")
@_lifetime
@_file
def node(name: str, days: float, file: Path | None) -> None:
    """A token with which the agent of node NAME announces itself and fetches images."""
    _hand_out(make_issuer(config()).node_token(name, lifetime=days * 86400), file)
