"""``vmjobs image convert``: from one format to another, in a sandbox."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from images.cli.common import byte_progress
from images.cli.inspect import convert_with_bar
from images.formats import Format
from images.inspect import convert as conversion
from images.inspect.inspection import inspect_image, limits_from_config, parse_format
from vmjobs.cli.common import config, echo
from vmjobs.errors import InvalidRequest

_BY_NAME = {".img": Format.RAW, **{f".{format_}": format_ for format_ in Format}}


@click.command("convert")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--format", "format_", default="", help="Format of OUT; default: by its suffix.")
@click.option("--from", "from_", default="auto", help="Required format of FILE.")
@click.option("--compress", is_flag=True, help="Compress (qcow2; vmdk: streamOptimized).")
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
def convert(file: Path, out: Path, format_: str, from_: str, compress: bool, force: bool) -> None:
    """Convert the image in FILE to OUT: raw, qcow2, vmdk, vdi or vhdx.

    FILE is inspected first, and refused if it refers to other files, is damaged or has another format
    than --from. Holes stay holes.
    """
    target = parse_format(format_) or _BY_NAME.get(out.suffix.lower())
    if target is None:
        raise InvalidRequest(
            f"{out.name!r} has no suffix of a known format", hint="give --format FORMAT"
        )
    if out.exists() and not force:
        raise InvalidRequest(f"{out} exists already", hint="--force replaces it")
    if not out.parent.is_dir():
        raise InvalidRequest(f"there is no directory {out.parent}")
    description = inspect_image(file, from_, limits_from_config(config()))
    if target is Format.RAW:
        if compress:
            raise InvalidRequest("raw has no compressed form", hint="--format qcow2 has")
        convert_with_bar(file, description, out)
    elif description.format is Format.RAW:
        _pack(file, target, out, compress=compress)
    else:
        with tempfile.TemporaryDirectory(prefix=".vmjobs-", dir=out.parent) as scratch:
            raw = Path(scratch) / "disk"
            convert_with_bar(file, description, raw)
            _pack(raw, target, out, compress=compress)
    echo(f"{out}: {target}, {out.stat().st_size} bytes")


def _pack(raw: Path, target: Format, out: Path, *, compress: bool) -> None:
    with byte_progress(f"writing {out.name}", raw.stat().st_size) as shown:
        conversion.from_raw(raw, target, out, progress=shown.show_fraction, compressed=compress)
