"""``vmjobs token``: bearer tokens of the built-in issuer."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import click

from api.tokens import USER_SCOPES, ApiTokenIssuer, Scope, make_issuer
from repository.db.database import Database
from repository.migrations import upgrade
from repository.tokens import TokenRecord, TokenRegister
from vmjobs.cli.common import config, echo, json_option, print_json, print_table, read_token
from vmjobs.errors import InvalidRequest, NotFound


@click.group()
def token() -> None:
    """Make, list and revoke bearer tokens (on the API's host)."""


@token.group()
def create() -> None:
    """Make a token. It is printed or written to a file, and stored nowhere else."""


_lifetime = click.option(
    "--days", type=click.FloatRange(min=0.0007), default=30.0, show_default=True, help="Lifetime."
)
_file = click.option(
    "--file", type=click.Path(path_type=Path), help="Write it to this file (0600), not to stdout."
)
_offline = click.option(
    "--offline", is_flag=True, help="Do not use the database: the token is listed once it is used."
)


@create.command()
@click.argument("subject")
@click.option("--group", "groups", multiple=True, help="A group that SUBJECT is in; may be repeated.")
@click.option(
    "--admin", is_flag=True, help="May also operate clusters, publish library images, collect garbage."
)
@_lifetime
@_file
@_offline
def user(
    subject: str, groups: tuple[str, ...], admin: bool, days: float, file: Path | None, offline: bool
) -> None:
    """Make a token with which SUBJECT submits and manages jobs and images."""
    issuer = make_issuer(config())
    scopes = USER_SCOPES | {Scope.ADMIN} if admin else USER_SCOPES
    _deliver_token(issuer, issuer.user_token(subject, scopes, days * 86400, groups), file, offline)


@create.command()
@click.argument("pool")
@_lifetime
@_file
@_offline
def rooster(pool: str, days: float, file: Path | None, offline: bool) -> None:
    """Make a token with which the condor_rooster of POOL wakes clusters without VMs."""
    issuer = make_issuer(config())
    _deliver_token(issuer, issuer.rooster_token(pool, lifetime=days * 86400), file, offline)


@create.command()
@click.argument("name")
@_lifetime
@_file
@_offline
def node(name: str, days: float, file: Path | None, offline: bool) -> None:
    """Make a token with which the agent of node NAME announces it and fetches images."""
    issuer = make_issuer(config())
    _deliver_token(issuer, issuer.node_token(name, lifetime=days * 86400), file, offline)


for _command in (user, rooster, node):
    _legacy_command = copy.copy(_command)  # the spelling before `create` existed
    _legacy_command.hidden = True
    token.add_command(_legacy_command)


@token.command("list")
@click.option("--subject", metavar="NAME", help="Only those of this user, node or pool.")
@click.option("--all", "everything", is_flag=True, help="Also expired and revoked ones.")
@json_option
def list_tokens(subject: str | None, everything: bool, as_json: bool) -> None:
    """List the valid tokens."""
    with _open_register() as register:
        found = register.tokens(subject, everything=everything)
    if as_json:
        print_json(found)
    else:
        _print_records(found)


@token.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--subject", metavar="NAME", help="All tokens of this user, node or pool.")
@click.option("--file", type=click.Path(path_type=Path, dir_okay=False), help="The token in this file.")
@json_option
def revoke(ids: tuple[str, ...], subject: str | None, file: Path | None, as_json: bool) -> None:
    """Revoke tokens, within 10 seconds. A unique prefix of an ID suffices."""
    if not (ids or subject or file):
        raise InvalidRequest("no token is named", hint="give an ID, --subject NAME or --file FILE")
    with _open_register() as register:
        chosen = list(ids)
        if file is not None:
            record = make_issuer(config()).verify(read_token(file)).record
            register.record(record)
            chosen.append(record.id)
        if subject is not None:
            of_subject = [record.id for record in register.tokens(subject)]
            if not of_subject:
                raise NotFound(f"{subject} has no valid token", hint="vmjobs token list --all")
            chosen += of_subject
        done = register.revoke(chosen)
    if as_json:
        print_json(done)
    else:
        _print_records(done)


def _deliver_token(issuer: ApiTokenIssuer, text: str, file: Path | None, offline: bool) -> None:
    if not offline:
        with _open_register() as register:
            register.record(issuer.verify(text).record)
    if file is None:
        echo(text)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as sink:
        os.fchmod(handle, 0o600)  # the file may have existed
        sink.write(text + "\n")


@contextmanager
def _open_register() -> Iterator[TokenRegister]:
    upgrade(config().database)
    database = Database(config().database)
    try:
        yield TokenRegister(database)
    finally:
        database.close()


def _print_records(records: list[TokenRecord]) -> None:
    present = datetime.now(UTC)
    rows = [
        (
            record.id,
            record.kind,
            record.subject,
            _day(record.issued),
            _day(record.expires),
            "revoked" if record.revoked else "expired" if record.expires <= present else "works",
        )
        for record in records
    ]
    print_table(("ID", "KIND", "SUBJECT", "ISSUED", "EXPIRES", "STATE"), rows, ids=True)


def _day(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d")
