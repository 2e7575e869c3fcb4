"""The door: what is let in as an image, before any program but this one has opened it."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from images.bootinfo import boot_of
from images.formats import Description, Format, Limits, detect, inspect
from images.formats.base import MIB, open_image, opened, refusal
from images.formats.signatures import HEAD, TAIL, archive_kind
from vmjobs.config import Config


def limits_of(config: Config) -> Limits:
    """The limits that the settings name."""
    return Limits(virtual_size=config.max_image_size * MIB)


def pinned(format: str | None) -> Format | None:
    """A format by its name; ``None``, ``""`` and ``auto``: what the header says.

    Raises:
        ImageRejected: there is none of that name.
    """
    if not format or format == "auto":
        return None
    try:
        return Format(format.lower())
    except ValueError:
        names = ", ".join(Format)
        raise refusal(
            "unknown_format", f"{format[:40]!r} is no format that is taken; these are: {names}"
        ) from None


def admit(path: Path, format: str | None = None, limits: Limits | None = None) -> Description:
    """Let a file in as an image, or refuse it.

    Args:
        format: what its owner says that it is; ``None``: what the header says. From here on the
            description's format is what it is, and nobody looks for another one.
        limits: what is refused for its size alone.

    Raises:
        ImageRejected: with one sentence for a person and a stable code in ``faults[0].code``.
    """
    limits = limits or Limits()
    with open_image(path) as file:
        named = pinned(format)
        if named is None:
            with opened(file, limits) as reader:
                named = detect(reader.head(HEAD), reader.tail(TAIL))
            if named is Format.RAW:
                _check_is_disk(file, limits)
        return inspect(file, named, limits)


def _check_is_disk(file: BinaryIO, limits: Limits) -> None:
    """Bytes that nobody said to be a raw disk have to look like one. Raises ImageRejected."""
    with opened(file, limits) as reader:
        kind = archive_kind(reader.head(HEAD))
    try:
        found = boot_of(file)
    except OSError as error:
        raise refusal("unreadable", f"the file cannot be read: {error.strerror}") from error
    if kind:
        raise refusal("not_a_disk", f"the file is {kind} and not a disk; unpack it first")
    if not found.is_disk:
        raise refusal(
            "not_an_image",
            "the file is no disk image: no known header, no partition table, no file system",
            hint="if it is a raw disk all the same, say so: --format raw",
        )
