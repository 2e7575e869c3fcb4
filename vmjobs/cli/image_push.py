"""``vmjobs image push``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click

from images.store import ImageStore
from vmjobs.cli.image_change import parse_share
from vmjobs.cli.image_sending import Brought, Terms, Wishes, from_file, from_store, publish, send
from vmjobs.cli.image_support import (
    Name,
    called,
    complete_local,
    jobs_option,
    parse_name,
    repository,
    say,
)
from vmjobs.cli.support import config, echo, json_option, print_json
from vmjobs.client.images import Images
from vmjobs.errors import InvalidRequest
from vmjobs.model import MIB, BootMethod
from vmjobs.wire import Visibility

FORMATS = ("raw", "qcow2", "vmdk", "vdi", "vhdx")
_path = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("source", metavar="FILE|LOCALIMAGE", required=False, shell_complete=complete_local)
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
@click.option("--all-local", is_flag=True, help="All of the local store; those unchanged are skipped.")
@jobs_option
@json_option
def push(
    source: str | None,
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
    all_local: bool,
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
    if all_local == bool(source):
        raise click.UsageError("push what? FILE, LOCALIMAGE or --all-local")
    terms = Terms(
        visibility=Visibility.PUBLIC if public else Visibility.PRIVATE,
        shares=tuple(parse_share(text) for text in shares),
        keep_days=keep_days,
        key=key,
    )
    with repository() as images:
        if source:
            wanted = parse_name(name, namespace) if name else None
            done = [_push_one(images, source, wanted, namespace, wishes, terms, parallel, as_json)]
        else:
            done = list(_push_all(images, namespace, terms, parallel, as_json))
    if as_json:
        print_json(done if all_local else done[0])


def _push_one(
    images: Images,
    source: str,
    wanted: Name | None,
    namespace: str,
    wishes: Wishes,
    terms: Terms,
    parallel: int,
    as_json: bool,
) -> dict[str, object]:
    began = time.monotonic()
    with _brought(source, wishes) as brought:
        wanted = wanted or parse_name(brought.name, namespace)
        sent = send(images, config().api_url, brought, parallel)
        found = publish(images, sent, wanted, terms)
    seconds = time.monotonic() - began
    if not as_json:
        rate = sent.size / MIB / max(seconds, 0.001)
        wire = f"{sent.sent / MIB:.1f} MiB sent"
        say(f"{sent.size / MIB:.0f} MiB in {seconds:.1f} s ({rate:.0f} MiB/s), {wire}")
        echo(f"{called(found, wanted)} {found.digest}")
    return {"image": found, "bytes": sent.size, "sent": sent.sent, "seconds": round(seconds, 3)}


def _push_all(
    images: Images, namespace: str, terms: Terms, parallel: int, as_json: bool
) -> Iterator[dict[str, object]]:
    """Every image of the local store with a plain name, under that name."""
    there = {(i.namespace, i.name, i.tag): i for i in images.list()}
    for entry in ImageStore(config().images).list():
        if "/" in entry.name:
            continue  # fetched from somebody's namespace, and at home there
        known = there.get((namespace, entry.name, entry.tag))
        if known and (known.digest, known.visibility) == (entry.digest, terms.visibility):
            if not as_json:
                echo(f"{namespace}/{entry.name}:{entry.tag} unchanged")
            continue
        wanted = Name(namespace, entry.name, entry.tag)
        ref = f"{entry.name}:{entry.tag}"
        yield _push_one(images, ref, wanted, namespace, Wishes(), terms, parallel, as_json)


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
