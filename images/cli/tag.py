"""``vmjobs image tag`` and ``rm``."""

from __future__ import annotations

import click

from images.cli.common import parse_name
from vmjobs.cli.common import complete_image, echo, image_argument, json_option, print_json, repository
from vmjobs.client.images import Images
from vmjobs.errors import Conflict, NotFound
from vmjobs.wire import ImageDetail, ImageTag

LIBRARY = "library"


@click.command()
@image_argument
@click.argument("name", metavar="NEWNAME[:TAG]")
@json_option
def tag(image: str, name: str, as_json: bool) -> None:
    """Give IMAGE the name NEWNAME[:TAG]; the name moves if another image has it.

    Submitted jobs keep the image that they were submitted with.
    """
    wanted = parse_name(name)
    with repository() as images:
        found = images.detail(image)
        given = _tag_text(images.tag(wanted.namespace, wanted.name, wanted.tag, found.digest))
    if as_json:
        print_json({"digest": found.digest, "name": given})
        return
    echo(f"{given} is {found.digest}")


@click.command("rm")
@click.argument("names", metavar="IMAGE...", nargs=-1, required=True, shell_complete=complete_image)
@click.option("--force", is_flag=True, help="Remove an image named by digest with all of its names.")
@json_option
def remove(names: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Remove names; an image that loses its last name is removed.

    A digest removes the image with its name; several names require --force. An image that an unfinished
    job needs stays, with its name.
    """
    done = []
    with repository() as images:
        for ref in names:
            done.append(_remove(images, ref, force))
            if not as_json:
                name, digest, gone = done[-1].values()
                echo(f"removed {name}" if gone else f"{name} no longer names {digest}")
    if as_json:
        print_json(done)


def _remove(images: Images, ref: str, force: bool) -> dict[str, object]:
    found = images.detail(ref)
    if ref.startswith("sha256:"):
        if len(found.tags) > 1 and not force:
            listing = ", ".join(_tag_text(one) for one in found.tags)
            raise Conflict(f"{ref} has several names: {listing}", hint="--force removes all of them")
        images.remove(found.digest)
        return {"name": ref, "digest": found.digest, "removed": True}
    referenced = _referenced_tag(found, ref)
    others = [one for one in found.tags if one != referenced]
    # A library name is the last one if no namespace has another; others, if their namespace has none.
    last = not any(referenced.namespace in {LIBRARY, other.namespace} for other in others)
    if last:
        images.remove(found.digest)
    else:
        images.untag(referenced.namespace, referenced.name, referenced.tag)
    return {"name": _tag_text(referenced), "digest": found.digest, "removed": last}


def _referenced_tag(found: ImageDetail, ref: str) -> ImageTag:
    """Return the name of an image that a reference means."""
    wanted = parse_name(ref)
    fitting = [
        one
        for one in found.tags
        if (one.name, one.tag) == (wanted.name, wanted.tag) and wanted.namespace in {"", one.namespace}
    ]
    if not fitting:
        raise NotFound(f"{ref} is not a name that can be removed")
    # Without a namespace, the user's own name comes before the library's.
    return min(fitting, key=lambda one: one.namespace == LIBRARY)


def _tag_text(one: ImageTag) -> str:
    return f"{one.namespace}/{one.name}:{one.tag}"
