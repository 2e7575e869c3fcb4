"""Raw disks, which must not carry the signature of another format.

A CD image that also boots as a disk (ISO 9660 with a boot sector) is a raw disk like others: no
program follows references in it to other files.
"""

from __future__ import annotations

from images.formats.base import Format, ImageDescription, ImageReader, check_disk, refusal
from images.formats.signatures import HEAD, TAIL, archive_kind, signatures


def refusal_of_raw(head: bytes, size: int, tail: bytes = b"") -> str:
    """Return why bytes cannot be a raw disk, as a sentence; ``""`` if they can.

    head: the first 64 KiB, or all. size: of the whole disk, in bytes. tail: its last 512 bytes.
    """
    if size <= 0:
        return "the disk is empty"
    found = signatures(head, tail)
    if not found:
        return ""
    return (
        f"the raw disk has the signature of another format ({', '.join(found)}): a program that probes "
        "formats would read it as that, and follow references that a guest wrote"
    )


def inspect(reader: ImageReader) -> ImageDescription:
    """Describe a raw disk. Raises ImageRejected."""
    head, tail = reader.head(HEAD), reader.tail(TAIL)
    if message := refusal_of_raw(head, reader.size, tail):
        raise refusal(
            "raw_with_header",
            message,
            hint="if the file has that format, name it; if a guest wrote it, the disk cannot be used",
        )
    if kind := archive_kind(head):
        raise refusal("not_a_disk", f"the file is {kind}, not a disk; unpack it first")
    check_disk(reader, reader.size)
    return ImageDescription(
        format=Format.RAW,
        version="",
        virtual_size=reader.size,
        file_size=reader.size,
        allocated=reader.allocated,
    )
