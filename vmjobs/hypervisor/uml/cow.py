"""Header of UML's copy-on-write files (``arch/um/drivers/cow_user.c``, version 3)."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from vmjobs.errors import HypervisorError

_MAGIC, _VERSION = 0x4F4F4F4D, 3
_SECTOR, _PAGE = 512, 4096
#: Magic, version, the base's modification time, its size.
_HEADER = struct.Struct(">IIIQ")
#: Bytes of a sector, alignment of the data, format: one that the kernel knows.
_SHAPE = struct.Struct(">III")
#: The base's path, as the kernel sees it.
_NAME = struct.Struct(">4096s")


def create_overlay(overlay: Path, base: Path, name: Path) -> None:
    """Create an empty overlay as the kernel would, atomically.

    Args:
        name: absolute path of the base for the kernel.
    """
    found = base.stat()
    head = _HEADER.pack(_MAGIC, _VERSION, int(found.st_mtime) & 0xFFFFFFFF, found.st_size)
    head += _SHAPE.pack(_SECTOR, _PAGE, 0) + _NAME.pack(os.fsencode(name))
    bitmap = (found.st_size + 8 * _SECTOR - 1) // (8 * _SECTOR)
    data = -(-(len(head) + bitmap) // _PAGE) * _PAGE
    fresh = overlay.with_name(f"{overlay.name}.new")
    with fresh.open("wb") as file:
        file.write(head)
        file.truncate(data + found.st_size)
    fresh.rename(overlay)


def update_base(overlay: Path, base: Path, name: Path) -> None:
    """Adapt an overlay, if any, to its base's present path and modification time.

    The kernel refuses a base with another modification time, and opens the path in the overlay. But an
    image's digest identifies it: one that was fetched again or restored from a backup is the same.

    Args:
        name: absolute path of the base for the kernel.

    Raises:
        HypervisorError: it is no overlay of UML's, or its base has another size.
    """
    try:
        file = overlay.open("r+b")
    except FileNotFoundError:
        return
    with file:
        data = file.read(_HEADER.size)
        if not data:
            overlay.unlink()  # the kernel died before it had written anything
            return
        magic, version, _, size = _HEADER.unpack(data.ljust(_HEADER.size, b"\0"))
        if (magic, version) != (_MAGIC, _VERSION):
            raise HypervisorError(f"{overlay} is no overlay of user-mode Linux")
        found = base.stat()
        if size != found.st_size:
            raise HypervisorError(f"{overlay} was made for another image than {base}")
        file.seek(0)
        file.write(_HEADER.pack(magic, version, int(found.st_mtime) & 0xFFFFFFFF, size))
        file.seek(_HEADER.size + _SHAPE.size)
        file.write(_NAME.pack(os.fsencode(name)))
