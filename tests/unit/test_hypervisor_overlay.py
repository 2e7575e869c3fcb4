"""Overlays that come from elsewhere."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.overlay import check


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """A header as QEMU writes it for an overlay of ours."""
    header = bytearray(104)
    struct.pack_into(">4sI", header, 0, b"QFI\xfb", 3)
    path = tmp_path / "overlay.qcow2"
    path.write_bytes(header)
    return path


def test_an_overlay_is_taken(overlay: Path) -> None:
    check(overlay)


def test_one_that_was_not_closed_is_taken(overlay: Path) -> None:
    _with(overlay, ">Q", 72, 1)
    check(overlay)


def test_one_whose_data_lie_in_another_file_is_refused(overlay: Path) -> None:
    """QEMU would open that file, whichever it is, and the guest would read it."""
    _with(overlay, ">Q", 72, 1 << 2)
    with pytest.raises(HypervisorError, match="features 0x4"):
        check(overlay)


@pytest.mark.parametrize("version", [2, 4])
def test_another_version_is_refused(overlay: Path, version: int) -> None:
    _with(overlay, ">I", 4, version)
    with pytest.raises(HypervisorError, match=f"version {version}"):
        check(overlay)


@pytest.mark.parametrize("content", [b"", b"QFI\xfb", b"\0" * 4096])
def test_what_is_no_qcow2_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "overlay.qcow2"
    path.write_bytes(content)
    with pytest.raises(HypervisorError, match="no qcow2 file"):
        check(path)


def _with(path: Path, layout: str, place: int, value: int) -> None:
    header = bytearray(path.read_bytes())
    struct.pack_into(layout, header, place, value)
    path.write_bytes(header)
