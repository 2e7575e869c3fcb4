"""Checks a VM's qcow2 overlay: it may refer to no files beyond those of its domain.

The header's layout: https://www.qemu.org/docs/master/interop/qcow2.html
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from vmjobs.errors import HypervisorError

_MAGIC: Final = b"QFI\xfb"
#: Allowed incompatible features: not closed properly; another compression of clusters; larger table
#: entries. Not allowed: data in another file, which QEMU would open (CVE-2024-32498).
_ALLOWED_FEATURES: Final = 1 << 0 | 1 << 3 | 1 << 4
_FEATURES_AT: Final = 72


def check(path: Path) -> None:
    """Refuse a file that makes QEMU open files beyond the domain's, or is no overlay.

    The header's backing file is not checked: the domain XML overrides it.

    Raises:
        HypervisorError: the file is refused, or cannot be read.
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
    if version != 3 or features & ~_ALLOWED_FEATURES:
        message = f"{path} is a qcow2 file of version {version} with features {features:#x}"
        raise HypervisorError(f"{message}, which VM overlays never have")
