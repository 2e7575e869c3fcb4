"""Raw disks: bytes as they are. What is looked at is that nobody takes them for something else.

A CD image that boots as a disk too (ISO 9660 with a boot sector) is a raw disk like others: no
program follows anything that it says to other files.
"""

from __future__ import annotations

from images.formats.base import Description, Format, Limits, Reader, check_disk, refusal
from images.formats.signatures import HEAD, TAIL, archive_kind, signatures


def refusal_of_raw(head: bytes, size: int, tail: bytes = b"") -> str:
    """Why bytes cannot be a raw disk, as a sentence; ``""`` if they can.

    head: the first 64 KiB, or all. size: of the whole disk, in bytes. tail: its last 512 bytes.
    """
    if size <= 0:
        return "the disk is empty"
    found = signatures(head, tail)
    if not found:
        return ""
    return (
        f"the raw disk has the mark of another format ({', '.join(found)}): a program that probes "
        "would take it for that, and follow what a guest wrote there"
    )


def inspect(reader: Reader, limits: Limits) -> Description:
    """What is to say of a raw disk. Raises ImageRejected."""
    head, tail = reader.head(HEAD), reader.tail(TAIL)
    if message := refusal_of_raw(head, reader.size, tail):
        raise refusal(
            "raw_with_header",
            message,
            hint="if the file is in that format, say so; if a guest did it, its disk cannot be used",
        )
    if kind := archive_kind(head):
        raise refusal("not_a_disk", f"the file is {kind} and not a disk; unpack it first")
    check_disk(reader.size, limits)
    return Description(
        format=Format.RAW,
        version="",
        virtual_size=reader.size,
        file_size=reader.size,
        allocated=reader.allocated,
    )
