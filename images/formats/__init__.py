"""Formats of disk images, read by our own parsers before any other program opens a file.

:func:`inspect` says what a file is, or raises :class:`~vmjobs.errors.ImageRejected` with a sentence
and a stable code in ``faults[0].code``. It reads the one file that it is given, a bounded part of
it, and opens nothing else. The header decides what a file is, never its name; a format that the
caller names has to be the one that the header says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from images.formats import qcow2, raw, vdi, vhdx, vmdk
from images.formats.base import Description, Format, Limits, Reader, opened, refusal
from images.formats.raw import refusal_of_raw
from images.formats.signatures import (
    HEAD,
    TAIL,
    archive_kind,
    has_boot_signature,
    is_iso9660,
    signatures,
)

__all__ = ["Description", "Format", "Limits", "detect", "inspect", "refusal_of_raw"]

_PARSERS: Final[dict[Format, Callable[[Reader, Limits], Description]]] = {
    Format.RAW: raw.inspect,
    Format.QCOW2: qcow2.inspect,
    Format.VMDK: vmdk.inspect,
    Format.VDI: vdi.inspect,
    Format.VHDX: vhdx.inspect,
}

_REFUSED: Final = {
    "qcow": "the file is a qcow image of version 1, which is not taken",
    "qed": "the file is a QED image, which is not taken",
    "cowd": "the file is an extent of an ESX server's VMDK, which is not taken",
    "sesparse": "the file is an extent of an ESX server's VMDK, which is not taken",
    "vhd": "the file is a VHD (VPC) image, which is not taken",
    "parallels": "the file is a Parallels image, which is not taken",
    "luks": "the file is encrypted with LUKS; nothing could boot it",
    "bochs": "the file is a Bochs image, which is not taken",
    "cloop": "the file is a cloop image, which is not taken",
    "dmg": "the file is a DMG image, which is not taken",
    "vma": "the file is a Proxmox backup, which is not taken",
    "ewf": "the file is a forensic image (EWF), which is not taken",
}
_CONVERT: Final = "convert it to raw, qcow2, vmdk, vdi or vhdx first"


def detect(head: bytes, tail: bytes = b"") -> Format:
    """The format that a file's head says; raw if no format claims it.

    head: its first 64 KiB, or all. tail: its last 512 bytes.

    Raises:
        ImageRejected: it is in a format that is not taken, or in several at once.
    """
    found = signatures(head, tail)
    if len(found) > 1:
        raise refusal("polyglot", f"the file claims to be several things at once: {', '.join(found)}")
    if not found:
        return Format.RAW
    name = found[0]
    if name == "vmdk-descriptor":
        raise refusal(
            "extents_elsewhere",
            "the file is only the descriptor of a VMDK: its disk is in other files, named in it",
            hint="write it as one file: qemu-img convert -O vmdk IMAGE NEW",
        )
    if name in _REFUSED:
        raise refusal(f"is_{name}", _REFUSED[name], hint=_CONVERT)
    format_ = Format(name)
    if has_boot_signature(head):
        raise refusal("polyglot", f"the file is {format_} and a boot sector at once")
    if is_iso9660(head) and not _may_hold_iso(head, format_):
        raise refusal("polyglot", f"the file is {format_} and a CD image at once")
    return format_


def inspect(
    file: BinaryIO | Path, pinned: Format | None = None, limits: Limits | None = None
) -> Description:
    """What a file is.

    Args:
        file: its path, or open for reading (then it stays open).
        pinned: the format that it is said to have; ``None``: whatever the header says.
        limits: what is refused for its size.

    Raises:
        ImageRejected: with a sentence, and a code in ``faults[0].code``.
    """
    limits = limits or Limits()
    with opened(file, limits) as reader:
        head, tail = reader.head(HEAD), reader.tail(TAIL)
        if pinned is Format.RAW:
            return raw.inspect(reader, limits)
        format_ = detect(head, tail)
        if pinned is not None and format_ is not pinned:
            kind = archive_kind(head) or format_
            raise refusal("other_format", f"the file is said to be {pinned}, and is {kind}")
        return _PARSERS[format_](reader, limits)


def _may_hold_iso(head: bytes, format_: Format) -> bool:
    """Whether the mark may be the disk's own, in the file's data: only with small clusters."""
    return format_ is Format.QCOW2 and head[20:24] < (16).to_bytes(4, "big")
