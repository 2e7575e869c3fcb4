"""Overlays of User-mode Linux, and the base files they belong to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.uml.cow import create_overlay, update_base

#: As the kernel writes it for a base of 4 KiB.
HEAD = bytes.fromhex("4f4f4f4d 00000003 6b006445 0000000000001000 00000200 00001000 00000000")
DATA = b"/somewhere/base".ljust(4096, b"\0") + b"data"
NAME = Path("/vm/base")
NAMED = bytes(NAME).ljust(4096, b"\0") + b"data"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    made = tmp_path / "base"
    made.write_bytes(bytes(4096))
    os.utime(made, (1_000_000_000, 1_000_000_000.5))
    return made


def test_an_overlay_goes_with_its_base_whenever_that_was_written(tmp_path: Path, base: Path) -> None:
    overlay = tmp_path / "overlay"
    overlay.write_bytes(HEAD + DATA)
    update_base(overlay, base, NAME)
    expected = HEAD[:8] + (1_000_000_000).to_bytes(4, "big") + HEAD[12:] + NAMED
    assert overlay.read_bytes() == expected


def test_one_that_is_made_is_as_the_kernel_makes_it(tmp_path: Path, base: Path) -> None:
    overlay = tmp_path / "overlay"
    create_overlay(overlay, base, NAME)
    made = overlay.read_bytes()
    # A page of head and bitmap, rounded up, and the disk.
    assert len(made) == 8192 + 4096
    assert made.rstrip(b"\0") == HEAD[:8] + (1_000_000_000).to_bytes(4, "big") + HEAD[12:] + b"/vm/base"
    assert set(tmp_path.iterdir()) == {base, overlay}


def test_one_that_is_not_there_yet_is_the_kernels_to_make(tmp_path: Path, base: Path) -> None:
    overlay = tmp_path / "overlay"
    update_base(overlay, base, NAME)
    overlay.touch()  # the kernel died while creating it
    update_base(overlay, base, NAME)
    assert not overlay.exists()


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"short", "is no overlay"), (bytes(5000), "is no overlay"), (HEAD + DATA, "another")],
)
def test_what_is_none_of_the_base_is_refused(tmp_path: Path, base: Path, data: bytes, why: str) -> None:
    overlay = tmp_path / "overlay"
    overlay.write_bytes(data)
    base.write_bytes(bytes(8192))
    with pytest.raises(HypervisorError, match=why):
        update_base(overlay, base, NAME)
    assert overlay.read_bytes() == data
