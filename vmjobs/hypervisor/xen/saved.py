"""Replaces the domain XML in a file to which libvirt has saved a Xen VM.

The libxl driver resumes a VM with the XML in its file, and takes no other. Files of a VM have other
paths when it resumes. The header's layout is from ``libxl_domain.h`` in libvirt's source; it is in the
byte order of the host.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

from vmjobs.errors import HypervisorError

_HEADER: Final = struct.Struct("=16sII40x")
_MAGIC: Final = b"libvirt-xml\n \0 \r"
_VERSIONS: Final = range(1, 4)
_MAX_XML_BYTES: Final = 1024 * 1024
_COPY_BYTES: Final = 1024 * 1024


def replace_xml(path: Path, text: str) -> None:
    """Replace the domain XML of a saved VM. A crash in between leaves the file as it was, or replaced.

    Raises:
        HypervisorError: the file is no saved Xen VM, or cannot be read or written.
    """
    xml = text.encode() + b"\0"
    fresh = path.with_name(f"{path.name}.new")
    try:
        with path.open("rb") as old:
            header, offset = _read_header(path, old.read(_HEADER.size))
            with fresh.open("wb") as new:
                new.write(header[:20] + struct.pack("=I", len(xml)) + header[24:] + xml)
                new.flush()
                while copied := os.copy_file_range(
                    old.fileno(), new.fileno(), _COPY_BYTES, offset_src=offset
                ):
                    offset += copied
        fresh.replace(path)
    except OSError as error:
        raise HypervisorError(f"cannot prepare the saved VM {path}: {error.strerror}") from error


def _read_header(path: Path, header: bytes) -> tuple[bytes, int]:
    """Check a header; return it, and the offset of the VM's memory."""
    if len(header) < _HEADER.size:
        raise HypervisorError(f"{path} is no saved Xen VM: it ends in its header")
    magic, version, length = _HEADER.unpack(header)
    if magic != _MAGIC or version not in _VERSIONS or not 0 < length <= _MAX_XML_BYTES:
        raise HypervisorError(f"{path} is no saved Xen VM: its header is not libvirt's")
    return header, _HEADER.size + length
