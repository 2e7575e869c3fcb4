"""Parsers of disk image formats, used before any other program opens a file.

:func:`inspect` describes a file, or raises :class:`~vmjobs.errors.ImageRejected` with a sentence and
a stable code in ``faults[0].code``. It reads a bounded part of the one file that it is given, and
opens no other. The header decides the format, never the file's name; a format that the caller names
must be the header's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from images.formats import qcow2, raw, vdi, vhdx, vmdk
from images.formats.base import Format, ImageDescription, ImageLimits, ImageReader, open_reader, refusal
from images.formats.raw import refusal_of_raw
from images.formats.signatures import (
    HEAD,
    TAIL,
    archive_kind,
    has_boot_signature,
    is_iso9660,
    signatures,
)

__all__ = ["Format", "ImageDescription", "ImageLimits", "detect", "inspect", "refusal_of_raw"]

_PARSERS: Final[dict[Format, Callable[[ImageReader], ImageDescription]]] = {
    Format.RAW: raw.inspect,
    Format.QCOW2: qcow2.inspect,
    Format.VMDK: vmdk.inspect,
    Format.VDI: vdi.inspect,
    Format.VHDX: vhdx.inspect,
}

_UNSUPPORTED: Final = {
    "qcow": "the file is a qcow image of version 1, which is not supported",
    "qed": "the file is a QED image, which is not supported",
    "cowd": "the file is an extent of an ESX server's VMDK, which is not supported",
    "sesparse": "the file is an extent of an ESX server's VMDK, which is not supported",
    "vhd": "the file is a VHD (VPC) image, which is not supported",
    "parallels": "the file is a Parallels image, which is not supported",
    "luks": "the file is encrypted with LUKS, so no VM can boot it",
    "bochs": "the file is a Bochs image, which is not supported",
    "cloop": "the file is a cloop image, which is not supported",
    "dmg": "the file is a DMG image, which is not supported",
    "vma": "the file is a Proxmox backup, which is not supported",
    "ewf": "the file is a forensic image (EWF), which is not supported",
}
_CONVERT_HINT: Final = "convert it to raw, qcow2, vmdk, vdi or vhdx first"


def detect(head: bytes, tail: bytes = b"") -> Format:
    """Return the format by a file's head; raw if no format's signature matches.

    head: its first 64 KiB, or all. tail: its last 512 bytes.

    Raises:
        ImageRejected: the format is not supported, or the file matches several.
    """
    found = signatures(head, tail)
    if len(found) > 1:
        raise refusal("polyglot", f"the file has signatures of several formats: {', '.join(found)}")
    if not found:
        return Format.RAW
    name = found[0]
    if name == "vmdk-descriptor":
        raise refusal(
            "extents_elsewhere",
            "the file is only the descriptor of a VMDK: its disk is in other files",
            hint="write it as one file: qemu-img convert -O vmdk IMAGE NEW",
        )
    if name in _UNSUPPORTED:
        raise refusal(f"is_{name}", _UNSUPPORTED[name], hint=_CONVERT_HINT)
    format_ = Format(name)
    if has_boot_signature(head):
        raise refusal("polyglot", f"the file is both {format_} and a boot sector")
    if is_iso9660(head) and not _may_hold_iso(head, format_):
        raise refusal("polyglot", f"the file is both {format_} and a CD image")
    return format_


def inspect(
    file: BinaryIO | Path, pinned: Format | None = None, limits: ImageLimits | None = None
) -> ImageDescription:
    """Describe a disk image file.

    Args:
        file: its path, or open for reading (then it stays open).
        pinned: the format that the caller expects; ``None``: the header's.
        limits: the largest accepted sizes.

    Raises:
        ImageRejected: with a sentence, and a code in ``faults[0].code``.
    """
    with open_reader(file, limits or ImageLimits()) as reader:
        head, tail = reader.head(HEAD), reader.tail(TAIL)
        if pinned is Format.RAW:
            return raw.inspect(reader)
        format_ = detect(head, tail)
        if pinned is not None and format_ is not pinned:
            kind = archive_kind(head) or format_
            raise refusal("other_format", f"the file is not {pinned}, as expected, but {kind}")
        return _PARSERS[format_](reader)


def _may_hold_iso(head: bytes, format_: Format) -> bool:
    """Whether the ISO mark may lie in the disk's data: only with small clusters."""
    return format_ is Format.QCOW2 and head[20:24] < (16).to_bytes(4, "big")
