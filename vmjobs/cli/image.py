"""``vmjobs image``: build images, and see which there are."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from images.build import build as build_image
from images.store import ImageEntry, ImageStore
from vmjobs.cli.support import config, json_option, print_json, print_table
from vmjobs.model import MIB


@click.group()
def image() -> None:
    """Build images and look at them."""


@image.command()
@click.argument("recipes", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Build anew even if nothing changed.")
@click.option("--work-dir", type=click.Path(path_type=Path, file_okay=False), help="Scratch directory.")
@json_option
def build(recipes: tuple[str, ...], force: bool, work_dir: Path | None, as_json: bool) -> None:
    """Build images from RECIPES (names of shipped recipes, or files) into the image store.

    Needs no root rights. A recipe whose inputs did not change is not built again.
    """
    settings = config()
    store = ImageStore(settings.images)
    built = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        for recipe in recipes:
            task = bars.add_task(f"{recipe}: starting", total=1.0)

            def show(step: str, fraction: float, task: TaskID = task, recipe: str = recipe) -> None:
                bars.update(task, description=f"{recipe}: {step}", completed=fraction)

            work = work_dir or settings.images.parent / "work"
            built.append(build_image(recipe, store, work, show, force=force))
            bars.update(task, description=f"{recipe}: done", completed=1.0)
    if as_json:
        print_json(built)
        return
    for entry in built:
        click.echo(f"{entry.name}:{entry.tag} {entry.digest}")
    sys.stdout.flush()


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
