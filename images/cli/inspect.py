"""``vmjobs image inspect``: shows a file's format and boot method, or its refusal."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from images import content
from images.cli.common import byte_progress
from images.formats import Format, ImageDescription
from images.inspect import convert
from images.inspect.bootinfo import BootInfo, detect_boot, detect_boot_of_bytes
from images.inspect.inspection import inspect_image, limits_from_config
from vmjobs.cli.common import config, json_option, print_json, print_table
from vmjobs.errors import ImageRejected, Unavailable
from vmjobs.model import MIB

#: Bytes of a disk that are converted to raw to find out how it boots.
_HEAD_BYTES = 2 * MIB


@dataclass(frozen=True)
class _Inspection:
    boot: BootInfo | None
    boot_fault: str = ""
    digest: str = ""


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--format", "format_", default="auto", help="Required format of FILE.")
@click.option("--digest", is_flag=True, help="Read all of the disk and print its content digest.")
@json_option
def inspect(file: Path, format_: str, digest: bool, as_json: bool) -> None:
    """Show the format of the image in FILE, how it boots, and whether it is accepted.

    Exits with 65 if it is refused. The parsers of vmjobs read FILE first; other formats than raw are
    unpacked in a sandbox.
    """
    try:
        description = inspect_image(file, format_, limits_from_config(config()))
        inspection = _inspect_disk(file, description, digest=digest)
    except ImageRejected as refused:
        _print_refusal(file, refused, as_json=as_json)
        sys.exit(refused.exit_code)
    if as_json:
        print_json(_as_json(file, description, inspection))
    else:
        _print(file, description, inspection)


def _inspect_disk(file: Path, description: ImageDescription, *, digest: bool) -> _Inspection:
    if description.format is Format.RAW:
        return _Inspection(detect_boot(file), digest=digest_of(file) if digest else "")
    if digest:
        with tempfile.TemporaryDirectory(prefix="vmjobs-") as scratch:
            raw = Path(scratch) / "disk"
            convert_with_bar(file, description, raw)
            return _Inspection(detect_boot(raw), digest=digest_of(raw))
    try:
        return _Inspection(detect_boot_of_bytes(convert.read_head(file, description, _HEAD_BYTES)))
    except Unavailable as missing:
        return _Inspection(None, missing.message)


def convert_with_bar(file: Path, description: ImageDescription, sink: Path) -> None:
    """Convert a disk to raw, with a progress bar."""
    with byte_progress(f"unpacking {file.name}", description.virtual_size) as shown:
        convert.to_raw(file, description, sink, progress=shown.show_fraction)


def digest_of(raw: Path) -> str:
    """Return the content digest of a raw disk, with a progress bar."""
    size = raw.stat().st_size
    with raw.open("rb", buffering=0) as opened, byte_progress(f"reading {raw.name}", size) as shown:
        return content.compute_layout(opened, size, shown).digest


def _as_json(file: Path, description: ImageDescription, inspection: _Inspection) -> dict[str, Any]:
    return {
        "file": str(file),
        "verdict": "admitted",
        **asdict(description),
        "boot": asdict(inspection.boot) if inspection.boot is not None else None,
        "digest": inspection.digest or None,
    }


def _print_refusal(file: Path, refused: ImageRejected, *, as_json: bool) -> None:
    code = refused.faults[0].code if refused.faults else ""
    if as_json:
        print_json(
            {
                "file": str(file),
                "verdict": "refused",
                "code": code,
                "message": refused.message,
                "hint": refused.hint,
            }
        )
        return
    rows = [("file", file), ("verdict", f"refused ({code})"), ("reason", refused.message)]
    print_table(("", ""), [*rows, *([("hint", refused.hint)] if refused.hint else [])])


def _print(file: Path, description: ImageDescription, inspection: _Inspection) -> None:
    version = f" {description.version}" if description.version else ""
    rows: list[tuple[str, object]] = [
        ("file", file),
        ("verdict", "admitted"),
        ("format", f"{description.format}{version}"),
        ("virtual size", _size(description.virtual_size)),
        ("file size", _size(description.file_size)),
        ("allocated", f"at most {_size(description.allocated)}"),
    ]
    if description.features:
        rows.append(("features", ", ".join(description.features)))
    if inspection.boot is None:
        rows.append(("boot", f"not inspected: {inspection.boot_fault}"))
    else:
        rows += _boot_rows(inspection.boot)
    if inspection.digest:
        rows.append(("content", inspection.digest))
    print_table(("", ""), rows)
    if inspection.boot is not None and inspection.boot.partitions:
        _print_partitions(inspection.boot)


def _boot_rows(found: BootInfo) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    if found.filesystem:
        rows.append(("file system", f"{found.filesystem} {found.label}".rstrip()))
    if found.table:
        rows.append(("partition table", found.table))
    if found.boot is None:
        return [*rows, ("boot", f"unknown: {found.why}")]
    option = f"--boot {found.boot}"
    if found.boot == "kernel" and found.partition:
        option += f" --partition {found.partition}"
    return [*rows, ("boot", f"{option}   ({found.why})")]


def _print_partitions(found: BootInfo) -> None:
    rows = [
        (v.number, v.kind, _size(v.begin), _size(v.size), v.filesystem, v.label)
        for v in found.partitions
    ]
    print_table(("PARTITION", "KIND", "BEGIN", "SIZE", "FILE SYSTEM", "LABEL"), rows)


def _size(count: int) -> str:
    return f"{count / MIB:.0f} MiB" if count >= 10 * MIB else f"{count / 1024:.0f} KiB"
