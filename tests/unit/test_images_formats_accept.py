"""Honest images of every format and kind are accepted and described correctly."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from images.formats import Format, ImageLimits, detect, inspect
from images.inspect.inspection import inspect_image, limits_from_config
from tests.kit.disk_formats import MADE, SIZE, Lab, qemu_img, refused
from vmjobs.config import Config
from vmjobs.errors import ImageRejected
from vmjobs.model import MIB


@pytest.mark.parametrize("name", MADE)
def test_an_honest_image_is_taken_and_little_of_it_is_read(
    lab: Lab, name: str, reads: list[int]
) -> None:
    path = lab.samples[name]
    found = inspect_image(path)
    # The largest sample has two tables of one 2 MiB cluster each.
    assert 0 < sum(reads) < 5_000_000
    assert found == inspect_image(path, MADE[name][0])
    assert found.format == MADE[name][0]
    assert found.virtual_size == SIZE
    assert found.file_size == path.stat().st_size
    # Its 750 KB of data, at most rounded up to the format's own units.
    assert 600_000 < found.allocated <= max(SIZE, found.unit)


def test_what_the_header_says_is_told(lab: Lab) -> None:
    told = {
        name: (inspect_image(path).version, inspect_image(path).features)
        for name, path in lab.samples.items()
    }
    assert told["qcow2-v2"] == ("2", ())
    assert told["qcow2-v3"] == ("3", ())
    assert told["qcow2-compressed"] == ("3", ("compressed (zlib)",))
    assert told["qcow2-zstd"] == ("3", ("compressed (zstd)",))
    assert told["qcow2-extended"] == ("3", ("extended L2 entries",))
    assert told["vmdk-sparse"] == ("1", ("monolithicSparse",))
    assert told["vmdk-stream"] == ("3", ("streamOptimized, compressed",))
    assert told["vdi-static"] == ("1.1", ("fixed",))
    assert told["vhdx-dynamic"] == ("1", ("dynamic",))
    assert inspect_image(lab.samples["qcow2-4k"]).unit == 4096
    assert inspect_image(lab.samples["qcow2-2M"]).unit == 2 * MIB


@pytest.mark.parametrize("format_", ["qcow2", "vmdk", "vdi", "vhdx"])
def test_empty_and_larger_disks_are_taken(tmp_path: Path, format_: str) -> None:
    for size in ("1M", "100G"):
        path = tmp_path / f"{size}"
        qemu_img("create", "-q", "-f", format_, path, size)
        assert inspect_image(path).allocated == 0


def test_neither_the_name_of_a_file_says_its_format_nor_nothing_at_all(lab: Lab) -> None:
    assert inspect_image(lab.copy("qcow2-v3", "disk.vmdk")).format is Format.QCOW2
    assert inspect_image(lab.copy("vdi-dynamic", "disk.raw")).format is Format.VDI
    # A file of no known format is raw, if its owner says so.
    assert detect(bytes(4096)) is Format.RAW
    assert inspect_image(lab.file(bytes(MIB)), "raw").virtual_size == MIB


@pytest.mark.parametrize("pinned", ["qcow2", "vmdk", "vdi", "vhdx"])
def test_a_pinned_format_has_to_be_the_headers(lab: Lab, pinned: str) -> None:
    for name, (format_, *_) in MADE.items():
        if format_ not in ("raw", pinned):
            message = refused(lab.samples[name], "other_format", pinned=pinned)
            assert pinned in message
            assert format_ in message


def test_an_unknown_format_is_refused(lab: Lab) -> None:
    assert "'iso'" in refused(lab.samples["raw"], "unknown_format", pinned="iso")
    assert "/etc" in refused(lab.samples["raw"], "unknown_format", pinned="../../etc")


def test_what_is_no_file_is_refused(lab: Lab, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not_a_file")
    refused(tmp_path, "not_a_file")
    refused(Path("/dev/zero"), "not_a_file")
    refused(tmp_path / "missing", "unreadable")
    refused(Path("a\0b"), "unreadable")


@pytest.mark.parametrize(
    ("code", "pinned", "data"),
    [
        *[("empty", pinned, b"") for pinned in (None, "raw", "qcow2")],
        *[("not_an_image", None, data) for data in (b"just text\n" * 512, b"\0", b"QFI", bytes(MIB))],
        *[("not_a_disk", pinned, gzip.compress(b"a disk" * 1000, mtime=0)) for pinned in (None, "raw")],
        ("not_a_disk", None, b"\x7fELF" + bytes(1020)),
        ("odd_size", "raw", b"x" * 1000),
    ],
)
def test_what_is_no_image_is_refused(lab: Lab, code: str, pinned: str | None, data: bytes) -> None:
    refused(lab.file(data), code, pinned=pinned)


def test_a_truncated_image_is_refused(lab: Lab) -> None:
    for name in MADE:
        if name == "raw":
            continue
        data = lab.data(name)
        for part in (16, 70, 100, 511, 513, 70_000, len(data) // 2):
            path = lab.file(bytes(data[:part]))
            with pytest.raises(ImageRejected):
                inspect(path, Format(MADE[name][0]))


def test_what_is_over_a_limit_is_refused(lab: Lab) -> None:
    limits = ImageLimits(virtual_size=4 * MIB)
    for name in MADE:
        assert "8 MiB" in refused(lab.samples[name], "disk_too_large", limits=limits)
    assert limits_from_config(Config(max_image_size=7)).virtual_size == 7 * MIB
    refused(lab.samples["qcow2-512"], "too_much_metadata", limits=ImageLimits(metadata=80_000))


@pytest.mark.parametrize("name", [name for name in MADE if name not in ("raw", "vmdk-stream")])
def test_a_file_much_larger_than_its_disk_is_refused(lab: Lab, name: str) -> None:
    """A sparse file of 4 TiB costs its sender nothing; its map would cost us memory."""
    path = lab.copy(name, "huge")
    os.truncate(path, 4 << 40)
    refused(path, "file_too_large")


def test_an_open_file_stays_open_and_where_it_was(lab: Lab) -> None:
    with lab.samples["qcow2-v3"].open("rb") as file:
        file.seek(7)
        assert inspect(file).format is Format.QCOW2
        assert file.tell() == 7
