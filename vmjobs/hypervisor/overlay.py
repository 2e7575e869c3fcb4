"""The overlay of a machine: a qcow2 file, which is to refer to nothing but what its domain says.

The header's layout: https://www.qemu.org/docs/master/interop/qcow2.html
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from vmjobs.errors import HypervisorError

_MAGIC: Final = b"QFI\xfb"
#: Of the incompatible features: it was not closed properly; its clusters may be compressed otherwise;
#: its tables have larger entries. Not: its data lie in another file, which would be opened
#: (CVE-2024-32498).
_HARMLESS: Final = 1 << 0 | 1 << 3 | 1 << 4
_FEATURES_AT: Final = 72


def check(path: Path) -> None:
    """Refuse one that would have QEMU open other files than its domain says, or that is none.

    What it says of its backing file is not looked at: the domain says that.

    Raises:
        HypervisorError: it is such a one, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_FEATURES_AT + 8)
    except OSError as error:
        raise HypervisorError(f"cannot read {path}: {error.strerror}") from error
    if len(header) < _FEATURES_AT + 8 or header[:4] != _MAGIC:
        raise HypervisorError(f"{path} is no qcow2 file")
    (version,) = struct.unpack_from(">I", header, 4)
    (features,) = struct.unpack_from(">Q", header, _FEATURES_AT)
    if version != 3 or features & ~_HARMLESS:
        message = f"{path} is a qcow2 file of version {version} with features {features:#x}"
        raise HypervisorError(f"{message}, which no overlay of a machine has")
