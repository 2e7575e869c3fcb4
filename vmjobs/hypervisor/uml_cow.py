"""The header of UML's copy-on-write files (``arch/um/drivers/cow_user.c``, version 3)."""

from __future__ import annotations

import struct
from pathlib import Path

from vmjobs.errors import HypervisorError

_MAGIC, _VERSION = 0x4F4F4F4D, 3
#: Magic, version, the base's time of modification, its size; what follows is left alone.
_HEADER = struct.Struct(">IIIQ")


def follow(overlay: Path, base: Path) -> None:
    """Have an overlay go with its base as it lies here now, if there is an overlay yet.

    The kernel takes a base of another time for another one. But images go by their digests: one that
    was fetched again, or came with a backup, is the same.

    Raises:
        HypervisorError: it is no overlay of UML's, or was made for something of another size.
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
