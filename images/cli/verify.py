"""``vmjobs image verify``."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from images.cli.common import ByteProgress, byte_progress
from images.content import CHUNK_BYTES, SEGMENT_BYTES, ContentLayout, compute_layout
from images.manifest import ImageManifest
from images.store.image_store import ImageStore
from vmjobs.cli.common import (
    complete_image,
    config,
    echo,
    json_option,
    print_json,
    read_token,
    repository,
)
from vmjobs.client import ImageClient
from vmjobs.client.images import Images
from vmjobs.errors import Unauthenticated, VMJobsError
from vmjobs.wire import DamagedBlock, ImageDetail, VerifyReport

#: Segments per request, so that the service answers within a few seconds.
SEGMENTS_PER_REQUEST = 16
#: Exit status if anything is damaged (EX_DATAERR).
EXIT_DAMAGED = 65


@click.command()
@click.argument("names", metavar="[IMAGE]...", nargs=-1, shell_complete=complete_image)
@click.option("--local", is_flag=True, help="Use the local image store instead of the service.")
@json_option
def verify(names: tuple[str, ...], local: bool, as_json: bool) -> None:
    """Verify every chunk of IMAGEs (by default, all of yours) and list damaged ones.

    The repository requests a damaged chunk again from the next push that has it. Exits with 65 if
    anything is damaged.
    """
    found = _local(names) if local else _remote(names)
    if as_json:
        print_json(found)
    else:
        for one in found:
            echo(_sentence(one))
            for line in one["damaged"]:
                echo(f"  {line}")
    sys.exit(EXIT_DAMAGED if any(one["damaged"] for one in found) else 0)


def _sentence(one: dict[str, Any]) -> str:
    state = f"{len(one['damaged'])} damaged chunks" if one["damaged"] else "good"
    return f"{one['image']}: {one['checked']} segments checked, {state}"


# --------------------------------------------------------------------------- in the service


def _remote(names: tuple[str, ...]) -> list[dict[str, Any]]:
    settings = config()
    fetcher = ImageClient(settings.api_url, read_token(settings.token_file))
    with repository() as images:
        refs = names or _own_digests(images)
        return [_verify(images, fetcher, ref, images.detail(ref)) for ref in refs]


def _own_digests(images: Images) -> tuple[str, ...]:
    """Return the digests of the user's own images, each once."""
    found, user = images.list(), _token_subject()
    return tuple(dict.fromkeys(entry.digest for entry in found if entry.owner == user))


def _token_subject() -> str:
    """Return the subject that the token claims."""
    file = config().token_file
    try:
        middle = read_token(file).split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(middle + "=" * (-len(middle) % 4)))
        return str(claims["sub"])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise Unauthenticated(
            f"{file} does not contain a token", hint="name the images to verify"
        ) from error


def _verify(images: Images, fetcher: ImageClient, ref: str, found: ImageDetail) -> dict[str, Any]:
    manifest = ImageManifest.model_validate(found.manifest)
    checked = 0
    lines: list[str] = []
    with byte_progress(ref[:40], manifest.size) as shown:
        for part in manifest.parts():
            layout = ContentLayout.parse(fetcher.layout(found.digest, part.digest), part.digest)
            stored = list(layout.stored())
            places: dict[bytes, list[int]] = {}
            for number, digest in stored:
                places.setdefault(digest, []).append(number)
            for begin in range(0, len(stored), SEGMENTS_PER_REQUEST):
                some = stored[begin : begin + SEGMENTS_PER_REQUEST]
                report = images.verify(found.digest, [digest for _, digest in some])
                checked += report.checked
                lines += _damage_lines(report, part.digest, places)
                shown(min(layout.size, (some[-1][0] + 1) * SEGMENT_BYTES))
            shown(layout.size)
            shown.start_next_part()
    return {"image": ref, "digest": found.digest, "checked": checked, "damaged": lines}


def _damage_lines(report: VerifyReport, content: str, places: dict[bytes, list[int]]) -> list[str]:
    lost = [DamagedBlock(segment=one, number=0, why="the segment is missing") for one in report.missing]
    return [
        f"{content} at byte {number * SEGMENT_BYTES + block.number * CHUNK_BYTES}: {block.why}"
        for block in (*report.damaged, *lost)
        for number in places.get(bytes.fromhex(block.segment), ())
    ]


# --------------------------------------------------------------------------- here


def _local(names: tuple[str, ...]) -> list[dict[str, Any]]:
    store = ImageStore(config().images)
    digests = [store.resolve(name) for name in names] or list(
        dict.fromkeys(entry.digest for entry in store.list())
    )
    found = []
    for digest, name in zip(digests, names or digests, strict=True):
        try:
            manifest = store.manifest(digest)
            with byte_progress(name[:40], manifest.size) as shown:
                checked, lines = _verify_local(store, manifest, shown)
        except VMJobsError as error:
            checked, lines = 0, [error.message]
        found.append({"image": name, "digest": digest, "checked": checked, "damaged": lines})
    return found


def _verify_local(
    store: ImageStore, manifest: ImageManifest, shown: ByteProgress
) -> tuple[int, list[str]]:
    checked = 0
    lines: list[str] = []
    for part in manifest.parts():
        layout = store.folder.layout(part.digest)
        try:
            lines += _verify_file(store, part.digest, layout, shown)
        except OSError as error:
            lines.append(f"{part.digest}: cannot be read: {error.strerror}")
        checked += sum(1 for _ in layout.stored())
        shown.start_next_part()
    return checked, lines


def _verify_file(
    store: ImageStore, content: str, layout: ContentLayout, shown: ByteProgress
) -> Iterator[str]:
    """Yield a line for each segment of a content's file whose digest is wrong."""
    with store.folder.path(content).open("rb", buffering=0) as file:
        actual = compute_layout(file, layout.size, shown)
    for number, digest in enumerate(layout.segments):
        if actual.segments[number] != digest:
            begin = number * SEGMENT_BYTES
            end = begin + layout.length(number)
            yield f"{content} from byte {begin} to {end}: the digest does not match"
