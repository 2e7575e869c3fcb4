"""``vmjobs image push``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from images.cli.change import parse_share
from images.cli.common import QualifiedName, complete_local, display_name, parse_name
from images.cli.upload import (
    CommandOptions,
    PendingPush,
    PublishOptions,
    from_file,
    from_store,
    send_and_publish,
)
from images.formats import Format
from images.store.image_store import ImageStore
from vmjobs.cli.common import config, echo, json_option, print_json, repository
from vmjobs.client.images import Images
from vmjobs.errors import InvalidRequest
from vmjobs.model import MIB, BootMethod
from vmjobs.wire import Visibility

_path = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("source", metavar="FILE|LOCALIMAGE", required=False, shell_complete=complete_local)
@click.argument("name", metavar="[NAME[:TAG]]", required=False, default="")
@click.option(
    "--format",
    "pinned",
    type=click.Choice([form.value for form in Format]),
    help="Required format of FILE; default: detected.",
)
@click.option(
    "--boot",
    type=click.Choice([way.value for way in BootMethod]),
    help="Boot method; default: detected, and printed.",
)
@click.option("--kernel", type=_path, help="The kernel that boots it.")
@click.option("--initrd", type=_path, help="The kernel's initial RAM disk.")
@click.option("--append", default="", help="Words for the kernel's command line.")
@click.option(
    "--partition", type=click.IntRange(0, 128), help="Partition of the root file system; 0: the disk."
)
@click.option("--cloud-init", is_flag=True, help="It reads NoCloud data when it boots.")
@click.option("--guest", is_flag=True, help="It has the guest program of vmjobs.")
@click.option("--xen", is_flag=True, help="Its kernel also runs paravirtualized on Xen.")
@click.option("--architecture", default="x86_64", show_default=True, help="Processor architecture.")
@click.option("--public", is_flag=True, help="All users may see and boot it.")
@click.option(
    "--share", "shares", multiple=True, metavar="user:NAME|group:NAME", help="Share with these."
)
@click.option("--keep-days", type=click.IntRange(0, 36500), default=0, help="0: until removed.")
@click.option("--namespace", default="", help="Default: yours. `library` requires an admin's token.")
@click.option("--sign", "key", type=_path, help="Sign it with this Ed25519 key (PEM or OpenSSH).")
@click.option("--all-local", is_flag=True, help="Push all images of the local store that changed.")
@click.option(
    "--parallel", type=click.IntRange(1, 32), default=4, show_default=True, help="Transfers at once."
)
@json_option
def push(
    source: str | None,
    name: str,
    boot: str | None,
    append: str,
    public: bool,
    shares: tuple[str, ...],
    keep_days: int,
    namespace: str,
    key: Path | None,
    all_local: bool,
    parallel: int,
    as_json: bool,
    **file_options: Any,
) -> None:
    """Send an image to the repository: a disk in FILE, or an image of the local store.

    Only data that the repository lacks is sent. Repeating an interrupted push resumes it. The image
    becomes NAME:TAG in your own namespace; NAME defaults to its local name or the file's name.
    """
    options = CommandOptions(
        boot=BootMethod(boot) if boot else None, cmdline=tuple(append.split()), **file_options
    )
    if all_local == bool(source):
        raise click.UsageError("give FILE, LOCALIMAGE or --all-local")
    publish_options = PublishOptions(
        visibility=Visibility.PUBLIC if public else Visibility.PRIVATE,
        shares=tuple(parse_share(text) for text in shares),
        keep_days=keep_days,
        key=key,
    )
    with repository() as images:
        if source:
            wanted = parse_name(name, namespace) if name else None
            done = [
                _push_one(
                    images, source, wanted, namespace, options, publish_options, parallel, as_json
                )
            ]
        else:
            done = list(_push_all(images, namespace, publish_options, parallel, as_json))
    if as_json:
        print_json(done if all_local else done[0])


def _push_one(
    images: Images,
    source: str,
    wanted: QualifiedName | None,
    namespace: str,
    options: CommandOptions,
    publish_options: PublishOptions,
    parallel: int,
    as_json: bool,
) -> dict[str, object]:
    began = time.monotonic()
    pending = _open_source(source, options)
    wanted, size = wanted or parse_name(pending.name, namespace), pending.size
    found, sent = send_and_publish(images, pending, wanted, publish_options, parallel)
    seconds = time.monotonic() - began
    if not as_json:
        rate = size / MIB / max(seconds, 0.001)
        wire = f"{sent / MIB:.1f} MiB sent"
        echo(f"{size / MIB:.0f} MiB in {seconds:.1f} s ({rate:.0f} MiB/s), {wire}", err=True)
        echo(f"{display_name(found, wanted)} {found.digest}")
    return {"image": found, "bytes": size, "sent": sent, "seconds": round(seconds, 3)}


def _push_all(
    images: Images, namespace: str, publish_options: PublishOptions, parallel: int, as_json: bool
) -> Iterator[dict[str, object]]:
    """Push all images of the local store whose names have no namespace."""
    there = {(i.namespace, i.name, i.tag): i for i in images.list()}
    for entry in ImageStore(config().images).list():
        if "/" in entry.name:
            continue  # pulled from another namespace
        known = there.get((namespace, entry.name, entry.tag))
        if known and (known.digest, known.visibility) == (entry.digest, publish_options.visibility):
            if not as_json:
                echo(f"{namespace}/{entry.name}:{entry.tag} unchanged")
            continue
        wanted = QualifiedName(namespace, entry.name, entry.tag)
        ref = f"{entry.name}:{entry.tag}"
        yield _push_one(
            images, ref, wanted, namespace, CommandOptions(), publish_options, parallel, as_json
        )


def _open_source(source: str, options: CommandOptions) -> PendingPush:
    path, store = Path(source), ImageStore(config().images)
    if path.is_file():
        return from_file(path, options)
    if path.exists() or source.startswith((".", "/")):
        raise InvalidRequest(
            f"{source} is not a file" if path.exists() else f"the file {source} does not exist"
        )
    if options != CommandOptions():
        raise InvalidRequest(
            "boot options are for files: an image of the local store has its own",
            hint=f"the file {source} does not exist; check its name",
        )
    return from_store(store, source)
