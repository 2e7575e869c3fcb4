"""Checks of overlays that come from elsewhere."""

from __future__ import annotations

import struct
from contextlib import nullcontext
from pathlib import Path

import pytest

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.overlay import check


@pytest.fixture
def overlay(path: Path) -> Path:
    """A header as QEMU writes it for an overlay of ours."""
    header = bytearray(104)
    struct.pack_into(">4sI", header, 0, b"QFI\xfb", 3)
    path.write_bytes(header)
    return path


@pytest.mark.parametrize(
    ("layout", "place", "value", "why"),
    [
        (">Q", 72, 0, ""),
        (">Q", 72, 1, ""),  # was not closed
        # QEMU would open any file named here as the data file, and the guest would read it.
        (">Q", 72, 1 << 2, "features 0x4"),
        (">I", 4, 2, "version 2"),
        (">I", 4, 4, "version 4"),
    ],
)
def test_what_is_taken_of_headers(overlay: Path, layout: str, place: int, value: int, why: str) -> None:
    header = bytearray(overlay.read_bytes())
    struct.pack_into(layout, header, place, value)
    overlay.write_bytes(header)
    with pytest.raises(HypervisorError, match=why) if why else nullcontext():
        check(overlay)


@pytest.mark.parametrize("content", [b"", b"QFI\xfb", b"\0" * 4096])
def test_what_is_no_qcow2_file_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(HypervisorError, match="no qcow2 file"):
        check(path)
