"""``vmjobs image pull``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from images.cli.common import byte_progress, display_name
from images.formats import Format
from images.manifest import ImageManifest, Part
from images.store.image_store import ImageStore
from images.transfer.pull import pull_file, pull_image
from vmjobs.cli.common import (
    config,
    echo,
    image_argument,
    json_option,
    print_json,
    read_token,
    repository,
)
from vmjobs.client import ImageClient
from vmjobs.client.images import TRANSFER_RETRIES
from vmjobs.errors import InvalidRequest
from vmjobs.model import MIB
from vmjobs.wire import ImageDetail


@click.command()
@image_argument
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--format",
    "form",
    type=click.Choice([form.value for form in Format]),
    default="raw",
    help="Format of FILE.",
)
@click.option("--compress", is_flag=True, help="Compress FILE, if the format can (qcow2, vmdk).")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@json_option
def pull(image: str, file: Path | None, form: str, compress: bool, force: bool, as_json: bool) -> None:
    """Fetch IMAGE into the local image store, or its disk into FILE.

    Every byte is verified. Repeating an interrupted pull resumes it. A kernel and an initial RAM disk
    of the image become FILE.kernel and FILE.initrd.
    """
    began = time.monotonic()
    if file is not None and file.exists() and not force:
        raise InvalidRequest(f"{file} exists already", hint="--force replaces it")
    settings = config()
    fetcher = ImageClient(settings.api_url, read_token(settings.token_file), retries=TRANSFER_RETRIES)
    with repository() as images:
        found = images.detail(image)
    manifest = ImageManifest.model_validate(found.manifest)
    if file is None:
        _into_store(fetcher, image, found, manifest)
        written = []
    else:
        written = _into_files(fetcher, image, found, manifest, file, Format(form), compress)
    seconds = time.monotonic() - began
    if as_json:
        print_json(
            {"image": found, "files": written, "bytes": found.size, "seconds": round(seconds, 3)}
        )
        return
    rate = found.size / MIB / max(seconds, 0.001)
    echo(f"{found.size / MIB:.0f} MiB in {seconds:.1f} s ({rate:.0f} MiB/s)", err=True)
    echo("\n".join(map(str, written)) or f"{display_name(found, image)} {found.digest}")


def _into_store(fetcher: ImageClient, ref: str, found: ImageDetail, manifest: ImageManifest) -> None:
    store = ImageStore(config().images)
    with byte_progress(display_name(found, ref)[:40], manifest.size) as shown:
        pull_image(store, fetcher, found.digest, shown)
    for tag in found.tags:
        # Names of the library need no namespace, as for jobs.
        name = tag.name if tag.namespace == "library" else f"{tag.namespace}/{tag.name}"
        store.tag(name, tag.tag, found.digest)


def _into_files(
    fetcher: ImageClient,
    ref: str,
    found: ImageDetail,
    manifest: ImageManifest,
    file: Path,
    form: Format,
    compress: bool,
) -> list[Path]:
    wanted: list[tuple[Part, Path]] = [(manifest.root, file)]
    for name, part in (("kernel", manifest.kernel), ("initrd", manifest.initrd)):
        if part is not None:
            wanted.append((part, file.with_name(f"{file.name}.{name}")))
    with byte_progress(display_name(found, ref)[:40], manifest.size) as shown:
        for part, target in wanted:
            raw = target
            if part is manifest.root and form is not Format.RAW:
                raw = target.with_name(f".{target.name}.raw")
            pull_file(raw, fetcher, found.digest, part.digest, part.size, shown)
            shown.start_next_part()
            if raw is not target:
                _convert(raw, form, target, compress)
    return [target for _, target in wanted]


def _convert(raw: Path, form: Format, target: Path, compress: bool) -> None:
    from images.inspect.convert import from_raw  # noqa: PLC0415 - only this needs the sandbox

    with byte_progress(f"converting to {form}", raw.stat().st_size) as shown:
        from_raw(raw, form, target, progress=shown.show_fraction, compressed=compress)
    raw.unlink(missing_ok=True)
