"""``vmjobs image``: build images, and see which there are."""

from __future__ import annotations

import click

from images.store import ImageEntry, ImageStore
from vmjobs.cli.image_build import build
from vmjobs.cli.support import config, json_option, print_json, print_table
from vmjobs.model import MIB


@click.group()
def image() -> None:
    """Build images and look at them."""


image.add_command(build)


@image.command("list")
@click.option("--local", is_flag=True, help="The local image store instead of the API's.")
@json_option
def list_images(local: bool, as_json: bool) -> None:
    """List images."""
    entries = ImageStore(config().images).list() if local else _remote()
    if as_json:
        print_json(entries)
        return
    rows = [(f"{e.name}:{e.tag}", f"{e.size / MIB:.0f} MiB", e.architecture, e.digest) for e in entries]
    print_table(("IMAGE", "SIZE", "ARCHITECTURE", "DIGEST"), rows)


def _remote() -> list[ImageEntry]:
    from vmjobs.cli.support import client  # noqa: PLC0415 - only this needs the network

    return [ImageEntry(i.name, i.tag, i.digest, i.size, i.architecture) for i in client().images()]


@image.command()
@click.argument("ref")
@click.option("--local", is_flag=True, help="The local image store instead of the API's.")
@json_option
def show(ref: str, local: bool, as_json: bool) -> None:
    """Show one image: its parts, its recipe, its packages."""
    if local:
        store = ImageStore(config().images)
        digest = store.resolve(ref)
        manifest = store.manifest(digest).model_dump(mode="json")
    else:
        from vmjobs.cli.support import client  # noqa: PLC0415

        found = client().image(ref)
        digest, manifest = found.digest, found.manifest
    if as_json:
        print_json({"digest": digest, "manifest": manifest})
        return
    parts = {name: manifest[name] for name in ("root", "kernel", "initrd") if manifest.get(name)}
    rows = [("digest", digest), ("boot", manifest["boot"]), ("architecture", manifest["architecture"])]
    rows += [(name, f"{part['size'] / MIB:.0f} MiB  {part['digest']}") for name, part in parts.items()]
    rows += [("recipe", manifest["recipe"] or ""), ("packages", str(len(manifest["packages"])))]
    print_table(("", ""), rows)
    print_table(("PACKAGE", "VERSION"), sorted(manifest["packages"].items()))
