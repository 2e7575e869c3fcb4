"""``vmjobs image list`` and ``show``."""

from __future__ import annotations

from typing import Any

import click

from images.cli.common import display_name
from images.store.image_store import ImageStore
from vmjobs.cli.common import (
    config,
    format_age,
    image_argument,
    json_option,
    print_json,
    print_table,
    repository,
)
from vmjobs.model import MIB
from vmjobs.wire import ImageDetail, ImageInfo

local_option = click.option(
    "--local", is_flag=True, help="Use the local image store instead of the service."
)


@click.command("list")
@local_option
@click.option("--all", "everything", is_flag=True, help="Also deprecated and nameless images.")
@json_option
def list_images(local: bool, everything: bool, as_json: bool) -> None:
    """List images that you can use: your own, the library's and those shared with you."""
    if local:
        _list_local(as_json)
        return
    with repository() as images:
        found = images.list()
    if not everything:
        found = [entry for entry in found if entry.name and not entry.deprecated]
    if as_json:
        print_json(found)
        return
    columns = ("IMAGE", "SIZE", "OWNER", "SEEN BY", "CREATED", "DIGEST")
    print_table(columns, [_row(entry) for entry in found])


def _row(entry: ImageInfo) -> list[str]:
    mark = " (deprecated)" if entry.deprecated else ""
    return [
        (f"{entry.namespace}/{entry.name}:{entry.tag}" if entry.name else "-") + mark,
        _size(entry.size),
        entry.owner,
        entry.visibility.value,
        format_age(entry.created) if entry.created else "",
        entry.digest,
    ]


def _list_local(as_json: bool) -> None:
    found = ImageStore(config().images).list()
    if as_json:
        print_json([vars(entry) for entry in found])
        return
    rows = [(f"{e.name}:{e.tag}", _size(e.size), e.architecture, e.digest) for e in found]
    print_table(("IMAGE", "SIZE", "ARCHITECTURE", "DIGEST"), rows)


@click.command()
@image_argument
@local_option
@json_option
def show(image: str, local: bool, as_json: bool) -> None:
    """Show one image: its parts, boot method, visibility and origin."""
    if local:
        store = ImageStore(config().images)
        digest = store.resolve(image)
        manifest = store.manifest(digest).model_dump(mode="json", by_alias=True)
        rows = [("digest", digest)]
        if as_json:
            print_json({"digest": digest, "manifest": manifest})
            return
    else:
        with repository() as images:
            found = images.detail(image)
        if as_json:
            print_json(found)
            return
        manifest = found.manifest
        rows = _detail_rows(image, found)
    print_table(("", ""), [*rows, *_manifest_rows(manifest)])
    if manifest.get("packages"):
        print_table(("PACKAGE", "VERSION"), sorted(manifest["packages"].items()))


def _detail_rows(ref: str, found: ImageDetail) -> list[tuple[str, str]]:
    shares = ", ".join(f"{share.kind}:{share.name}" for share in found.shares)
    origin = ", ".join(f"{name} {value}" for name, value in found.origin if value)
    rows = [
        ("image", display_name(found, ref)),
        ("digest", found.digest),
        ("names", ", ".join(f"{t.namespace}/{t.name}:{t.tag}" for t in found.tags)),
        ("owner", found.owner),
        ("seen by", found.visibility.value + (f", {shares}" if shares else "")),
        ("created", format_age(found.created)),
        ("kept until", f"{found.expires:%Y-%m-%d}" if found.expires else "it is removed"),
        ("deprecated", found.deprecated),
        ("came from", origin),
        ("signed by", ", ".join(found.signers)),
        ("size", f"{_size(found.size)}, stored in {_size(found.stored)}"),
    ]
    return [(name, value) for name, value in rows if value]


def _manifest_rows(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("architecture", manifest["architecture"]), ("boots by", manifest["boot"])]
    parts = [(name, manifest[name]) for name in ("root", "kernel", "initrd") if manifest.get(name)]
    rows += [(name, f"{_size(part['size'])}  {part['digest']}") for name, part in parts]
    if manifest.get("cmdline"):
        rows.append(("command line", " ".join(manifest["cmdline"])))
    if manifest.get("partition"):
        rows.append(("root file system", f"partition {manifest['partition']}"))
    if manifest.get("guest"):
        rows.append(("guest program", f"contract {manifest['guest']['contract']}"))
    if manifest.get("cloud_init"):
        rows.append(("cloud-init", "yes"))
    rows += [(name, manifest[name]) for name in ("parent", "recipe") if manifest.get(name)]
    return rows


def _size(size: int) -> str:
    return f"{size / MIB:.0f} MiB" if size >= 10 * MIB else f"{size / MIB:.1f} MiB"
