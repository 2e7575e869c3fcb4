"""``vmjobs image share`` and ``deprecate``."""

from __future__ import annotations

import click

from vmjobs.cli.image_support import called, image_argument, repository
from vmjobs.cli.support import echo, json_option, print_json
from vmjobs.errors import InvalidRequest
from vmjobs.wire import ImageChange, Share, Visibility


def parse_share(text: str) -> Share:
    """``user:NAME`` or ``group:NAME``.

    Raises:
        InvalidRequest: it is none.
    """
    kind, _, name = text.partition(":")
    if kind == "user" and name:
        return Share(kind="user", name=name)
    if kind == "group" and name:
        return Share(kind="group", name=name)
    raise InvalidRequest(
        f"{text!r} is nobody to share with", hint="say user:NAME, or group:NAME as in your token"
    )


@click.command()
@image_argument
@click.argument("whom", metavar="[user:NAME|group:NAME]...", nargs=-1)
@click.option("--remove", is_flag=True, help="Do not share it with these any more.")
@click.option("--public", "visibility", flag_value="public", help="Everybody may see and boot it.")
@click.option("--private", "visibility", flag_value="private", help="You, and those it is shared with.")
@json_option
def share(
    image: str, whom: tuple[str, ...], remove: bool, visibility: str | None, as_json: bool
) -> None:
    """Say who may see and boot IMAGE. It stays yours to change."""
    named = [parse_share(text) for text in whom]
    if not named and visibility is None:
        raise click.UsageError("share with whom? user:NAME, group:NAME, --public or --private")
    with repository() as images:
        found = images.detail(image)
        shares = [old for old in found.shares if old not in named]
        change = ImageChange(
            visibility=Visibility(visibility) if visibility else None,
            shares=tuple(shares if remove else [*shares, *named]) if named else None,
        )
        found = images.change(found.digest, change)
    if as_json:
        print_json(found)
        return
    listing = ", ".join(f"{one.kind}:{one.name}" for one in found.shares) or "nobody"
    echo(f"{called(found, image)} is {found.visibility}, and shared with {listing}")


@click.command()
@image_argument
@click.argument("why", default="")
@click.option("--undo", is_flag=True, help="It may be used again.")
@json_option
def deprecate(image: str, why: str, undo: bool, as_json: bool) -> None:
    """Warn people off IMAGE, and say WHY. It works as before, and leaves the plain list."""
    if bool(why.strip()) == undo:
        raise click.UsageError("say why, or --undo")
    with repository() as images:
        found = images.change(images.detail(image).digest, ImageChange(deprecated=why.strip()))
    if as_json:
        print_json(found)
        return
    echo(f"{called(found, image)}: " + (f"deprecated: {why}" if why else "not deprecated any more"))
