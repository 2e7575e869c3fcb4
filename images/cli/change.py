"""``vmjobs image share`` and ``deprecate``."""

from __future__ import annotations

import click

from images.cli.common import display_name
from vmjobs.cli.common import echo, image_argument, json_option, print_json, repository
from vmjobs.errors import InvalidRequest
from vmjobs.wire import ImageChange, Share, Visibility


def parse_share(text: str) -> Share:
    """Parse ``user:NAME`` or ``group:NAME``.

    Raises:
        InvalidRequest: the text is neither.
    """
    kind, _, name = text.partition(":")
    if kind == "user" and name:
        return Share(kind="user", name=name)
    if kind == "group" and name:
        return Share(kind="group", name=name)
    raise InvalidRequest(
        f"cannot share with {text!r}", hint="give user:NAME, or group:NAME as in your token"
    )


@click.command()
@image_argument
@click.argument("names", metavar="[user:NAME|group:NAME]...", nargs=-1)
@click.option("--remove", is_flag=True, help="Stop sharing it with these.")
@click.option("--public", "visibility", flag_value="public", help="All users may see and boot it.")
@click.option(
    "--private", "visibility", flag_value="private", help="Only you and those it is shared with."
)
@json_option
def share(
    image: str, names: tuple[str, ...], remove: bool, visibility: str | None, as_json: bool
) -> None:
    """Set who may see and boot IMAGE. Only its owner can change it."""
    named = [parse_share(text) for text in names]
    if not named and visibility is None:
        raise click.UsageError("give user:NAME, group:NAME, --public or --private")
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
    listing = ", ".join(f"{one.kind}:{one.name}" for one in found.shares) or "no one"
    echo(f"{display_name(found, image)} is {found.visibility}, and shared with {listing}")


@click.command()
@image_argument
@click.argument("why", default="")
@click.option("--undo", is_flag=True, help="It may be used again.")
@json_option
def deprecate(image: str, why: str, undo: bool, as_json: bool) -> None:
    """Mark IMAGE as deprecated, because of WHY. It still works, but `list` hides it."""
    if bool(why.strip()) == undo:
        raise click.UsageError("give either WHY or --undo")
    with repository() as images:
        found = images.change(images.detail(image).digest, ImageChange(deprecated=why.strip()))
    if as_json:
        print_json(found)
        return
    echo(f"{display_name(found, image)}: " + (f"deprecated: {why}" if why else "no longer deprecated"))
