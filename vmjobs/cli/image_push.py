"""``vmjobs image push``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import click

from images.store import ImageStore
from vmjobs.cli.image_change import parse_share
from vmjobs.cli.image_sending import Brought, Sent, Wishes, from_file, from_store, send
from vmjobs.cli.image_support import (
    Name,
    called,
    complete_local,
    jobs_option,
    parse_name,
    repository,
    say,
)
from vmjobs.cli.support import config, json_option, print_json
from vmjobs.errors import InvalidRequest
from vmjobs.model import MIB, BootMethod
from vmjobs.wire import ImageDetail, Publication, Share, Visibility

FORMATS = ("raw", "qcow2", "vmdk", "vdi", "vhdx")
_path = click.Path(path_type=Path, dir_okay=False)


@dataclass(frozen=True)
class _Naming:
    """What the image is to be called, and who may see it."""

    name: str
    namespace: str
    visibility: Visibility
    shares: tuple[Share, ...]
    keep_days: int
    key: Path | None


@click.command()
@click.argument("source", metavar="FILE|LOCALIMAGE", shell_complete=complete_local)
@click.argument("name", metavar="[NAME[:TAG]]", required=False, default="")
@click.option(
    "--format", "pinned", type=click.Choice(FORMATS), help="What FILE must be; else told by its head."
)
@click.option(
    "--boot",
    type=click.Choice([way.value for way in BootMethod]),
    help="How it boots; else guessed, and told.",
)
@click.option("--kernel", type=_path, help="The kernel to boot it with.")
@click.option("--initrd", type=_path, help="The kernel's initial RAM disk.")
@click.option("--append", default="", help="Words for the kernel's command line.")
@click.option(
    "--partition", type=click.IntRange(0, 128), help="Of the root file system; 0: it is the disk."
)
@click.option("--cloud-init", is_flag=True, help="It looks for NoCloud data when it boots.")
@click.option("--guest", is_flag=True, help="The guest program of vmjobs is in it.")
@click.option("--architecture", default="x86_64", show_default=True, help="Of its machine code.")
@click.option("--public", is_flag=True, help="Everybody may see and boot it.")
@click.option("--share", "shares", multiple=True, metavar="user:NAME|group:NAME", help="So may these.")
@click.option("--keep-days", type=click.IntRange(0, 36500), default=0, help="0: until it is removed.")
@click.option("--namespace", default="", help="Whose name it gets; `library` takes an admin's token.")
@click.option("--sign", "key", type=_path, help="Sign it with this Ed25519 key (PEM or OpenSSH).")
@jobs_option
@json_option
def push(
    source: str,
    name: str,
    pinned: str | None,
    boot: str | None,
    kernel: Path | None,
    initrd: Path | None,
    append: str,
    partition: int | None,
    cloud_init: bool,
    guest: bool,
    architecture: str,
    public: bool,
    shares: tuple[str, ...],
    keep_days: int,
    namespace: str,
    key: Path | None,
    parallel: int,
    as_json: bool,
) -> None:
    """Send an image to the repository: a disk in FILE, or an image of the local store.

    Only what the repository does not have is sent. A push that was broken off goes on where it was
    when it is repeated. The image is NAME:TAG in your own namespace; without NAME, as it is called
    here, or as the file is.
    """
    wishes = Wishes(
        pinned=pinned,
        boot=BootMethod(boot) if boot else None,
        kernel=kernel,
        initrd=initrd,
        cmdline=tuple(append.split()),
        partition=partition,
        cloud_init=cloud_init,
        guest=guest,
        architecture=architecture,
    )
    began = time.monotonic()
    brought = _brought(source, wishes)
    with brought:
        naming = _Naming(
            name=name or brought.name,
            namespace=namespace,
            visibility=Visibility.PUBLIC if public else Visibility.PRIVATE,
            shares=tuple(parse_share(text) for text in shares),
            keep_days=keep_days,
            key=key,
        )
        wanted = parse_name(naming.name, naming.namespace)
        sent, found = _push(brought, wanted, naming, parallel)
    seconds = time.monotonic() - began
    if as_json:
        print_json(
            {"image": found, "bytes": sent.size, "sent": sent.sent, "seconds": round(seconds, 3)}
        )
        return
    rate = sent.size / MIB / max(seconds, 0.001)
    wire = f"{sent.sent / MIB:.1f} MiB sent"
    say(f"{sent.size / MIB:.0f} MiB in {seconds:.1f} s ({rate:.0f} MiB/s), {wire}")
    click.echo(f"{called(found, wanted)} {found.digest}")


def _brought(source: str, wishes: Wishes) -> Brought:
    path, store = Path(source), ImageStore(config().images)
    if path.is_file():
        return from_file(path, wishes)
    if path.exists() or source.startswith((".", "/")):
        raise InvalidRequest(
            f"{source} is not a file" if path.exists() else f"there is no file {source}"
        )
    if wishes != Wishes():
        raise InvalidRequest(
            "how an image of the local store boots is known, and in it",
            hint=f"there is no file {source}; is that what you meant?",
        )
    return from_store(store, source)


def _push(brought: Brought, wanted: Name, naming: _Naming, parallel: int) -> tuple[Sent, ImageDetail]:
    with repository() as images:
        sent = send(images, config().api_url, brought, parallel)
        publication = Publication(
            manifest=sent.manifest.model_dump(mode="json", by_alias=True),
            upload=sent.upload,
            namespace=wanted.namespace,
            name=wanted.name,
            tag=wanted.tag,
            visibility=naming.visibility,
            shares=naming.shares,
            keep_days=naming.keep_days,
            origin=brought.origin,
            signature=_signature(sent.manifest.digest, naming.key),
        )
        found = images.publish(publication)
        sent.note.forget()
    return sent, found


def _signature(digest: str, key: Path | None) -> str:
    if key is None:
        return ""
    from images.signature import private_key, sign  # noqa: PLC0415 - few sign

    return sign(digest, private_key(key))
