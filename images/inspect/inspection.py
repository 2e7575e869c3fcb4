"""Image inspection: checks a file before any program other than this one opens it."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from images.formats import Format, ImageDescription, ImageLimits, detect, inspect
from images.formats.base import MIB, open_image, open_reader, refusal
from images.formats.signatures import HEAD, TAIL, archive_kind
from images.inspect.bootinfo import detect_boot
from vmjobs.config import Config


def limits_from_config(config: Config) -> ImageLimits:
    return ImageLimits(virtual_size=config.max_image_size * MIB)


def parse_format(format: str | None) -> Format | None:
    """The format of that name; ``None`` (the header decides) for ``""`` and ``auto``.

    Raises:
        ImageRejected: the name is unknown.
    """
    if not format or format == "auto":
        return None
    try:
        return Format(format.lower())
    except ValueError:
        names = ", ".join(Format)
        raise refusal(
            "unknown_format", f"unknown image format {format[:40]!r} (expected one of: {names})"
        ) from None


def inspect_image(
    path: Path, format: str | None = None, limits: ImageLimits | None = None
) -> ImageDescription:
    """Check that a file is an acceptable image, and describe it.

    Args:
        format: the format that the owner declares; ``None``: the header decides. Later steps take
            the format from the description and do not detect it again.
        limits: the largest sizes that are accepted.

    Raises:
        ImageRejected: with one sentence for the user and a stable code in ``faults[0].code``.
    """
    limits = limits or ImageLimits()
    with open_image(path) as file:
        named = parse_format(format)
        if named is None:
            with open_reader(file, limits) as reader:
                head = reader.head(HEAD)
                named = detect(head, reader.tail(TAIL))
            if named is Format.RAW:
                _check_is_disk(file, head)
        return inspect(file, named, limits)


def _check_is_disk(file: BinaryIO, head: bytes) -> None:
    """Refuse a file without a declared format that does not look like a raw disk."""
    try:
        found = detect_boot(file)
    except OSError as error:
        raise refusal("unreadable", f"the file cannot be read: {error.strerror}") from error
    if kind := archive_kind(head):
        raise refusal("not_a_disk", f"the file is {kind} and not a disk; unpack it first")
    if not found.is_disk:
        raise refusal(
            "not_an_image",
            "the file is not a disk image: no known header, no partition table, no file system",
            hint="if it is a raw disk, add --format raw",
        )
