"""Conversion: a disk has one digest in all formats, and returns unchanged."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from images.content import compute_layout
from images.formats import Format
from images.inspect.convert import from_raw, read_head, to_raw
from images.inspect.inspection import inspect_image
from tests.kit.disk_formats import MADE, SIZE, Lab, disk, qemu_img, stream_with_footer
from tests.kit.full_disk import small_disk
from tests.kit.segments import compute_layout_of_bytes
from vmjobs.errors import ImageRejected, StorageFull

MIB = 1024 * 1024


def digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return compute_layout(file, path.stat().st_size).digest


@pytest.mark.parametrize("name", MADE)
def test_one_disk_has_one_digest(lab: Lab, tmp_path: Path, name: str) -> None:
    source, sink = lab.samples[name], tmp_path / "sink"
    seen: list[float] = []
    to_raw(source, inspect_image(source, MADE[name][0]), sink, progress=seen.append)
    assert digest(sink) == compute_layout_of_bytes(disk()).digest
    assert sink.stat().st_size == SIZE
    assert sink.stat().st_blocks * 512 < 1_500_000, "holes stay holes"
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["sink"]
    assert read_head(source, inspect_image(source), 2 * MIB + 5) == disk()[: 2 * MIB + 5]


def test_a_stream_as_vmware_writes_it_has_the_same_digest(lab: Lab, tmp_path: Path) -> None:
    stream = stream_with_footer(lab)
    to_raw(stream, inspect_image(stream), tmp_path / "sink")
    assert digest(tmp_path / "sink") == compute_layout_of_bytes(disk()).digest


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("format_", list(Format))
def test_there_and_back(lab: Lab, tmp_path: Path, format_: Format, compressed: bool) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    if compressed and format_ not in (Format.QCOW2, Format.VMDK):
        with pytest.raises(ImageRejected):
            from_raw(lab.samples["raw"], format_, there, compressed=True)
        return
    from_raw(lab.samples["raw"], format_, there, compressed=compressed)
    found = inspect_image(there, format_)
    assert found.virtual_size == SIZE
    if compressed:
        assert any("compressed" in feature for feature in found.features)
    to_raw(there, found, back)
    assert back.read_bytes() == disk()


def test_odd_sizes_survive(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.write_bytes(b"A" * 512 * 2051)
    for format_ in Format:
        there, back = tmp_path / f"{format_}", tmp_path / "back"
        from_raw(raw, format_, there)
        to_raw(there, inspect_image(there, format_), back)
        assert back.read_bytes() == raw.read_bytes(), format_


def test_zeros_at_the_end_survive(tmp_path: Path) -> None:
    raw, sink = tmp_path / "raw", tmp_path / "sink"
    raw.write_bytes(b"A" * 65536)
    os.truncate(raw, 64 * MIB)
    to_raw(raw, inspect_image(raw, "raw"), sink)
    assert sink.stat().st_size == 64 * MIB
    assert digest(sink) == digest(raw)


def test_an_image_that_was_changed_meanwhile_is_refused(lab: Lab, tmp_path: Path) -> None:
    source = lab.copy("qcow2-v3", "image")
    description = inspect_image(source)
    qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", "/etc/passwd", "-F", "raw", source, "8M")
    with pytest.raises(ImageRejected) as caught:
        to_raw(source, description, tmp_path / "sink")
    assert caught.value.faults[0].code == "backing_file"
    lab.copy("qcow2-4k", "image")
    with pytest.raises(ImageRejected) as caught:
        to_raw(source, description, tmp_path / "sink")
    assert caught.value.faults[0].code == "changed"
    assert not (tmp_path / "sink").exists()


def test_damaged_data_is_refused_and_leaves_nothing(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "sink").write_bytes(b"what was there")
    data = lab.data("qcow2-compressed")
    # Overwrite all data: compressed clusters do not unpack any more.
    source = lab.file(bytes(data[: 5 * 65536]).ljust(len(data), b"\xa5"))
    with pytest.raises(ImageRejected) as caught:
        to_raw(source, inspect_image(source), tmp_path / "sink")
    assert caught.value.faults[0].code == "conversion_failed"
    assert "qemu-img" in caught.value.message
    assert (tmp_path / "sink").read_bytes() == b"what was there"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("format_", ["qcow2", "vmdk", "vdi", "vhdx"])
def test_an_image_within_an_image_is_refused(lab: Lab, tmp_path: Path, format_: str) -> None:
    """A program that probes the unpacked disk would interpret the inner image."""
    inner, outer = lab.copy("qcow2-v3", "inner"), tmp_path / "outer"
    qemu_img("convert", "-f", "raw", "-O", format_, inner, outer)
    description = inspect_image(outer)
    for call in (lambda: to_raw(outer, description, tmp_path / "sink"), lambda: head(outer)):
        with pytest.raises(ImageRejected) as caught:
            call()
        assert caught.value.faults[0].code == "raw_with_header"
    assert not (tmp_path / "sink").exists()


def head(path: Path) -> bytes:
    return read_head(path, inspect_image(path), MIB)


def test_names_of_files_have_no_meaning(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """qemu-img takes some names for protocols; here each names a file."""
    monkeypatch.chdir(tmp_path)
    for name in ("nbd:localhost:1", 'json:{"driver":"nbd"}', "-O", "a,b=c", "a b\n", "fat:rw:x"):
        source = lab.copy("qcow2-v3", name)
        sink = tmp_path / f"{name}.raw"
        to_raw(Path(name), inspect_image(Path(name)), Path(sink.name))
        assert sink.read_bytes() == disk()
        source.unlink()


def test_a_place_that_cannot_be_written_is_said(lab: Lab, tmp_path: Path) -> None:
    source = lab.samples["qcow2-v3"]
    with pytest.raises(ImageRejected) as caught:
        to_raw(source, inspect_image(source), tmp_path / "missing" / "sink")
    assert caught.value.faults[0].code == "unwritable"
    with pytest.raises(ImageRejected) as caught:
        to_raw(source, replace(inspect_image(source), virtual_size=MIB), tmp_path / "sink")
    assert caught.value.faults[0].code == "disk_too_large"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_full_disk_is_said_to_be_full(lab: Lab, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 0.5) as small:
        for name in ("qcow2-v3", "raw"):
            source = lab.samples[name]
            with pytest.raises(StorageFull):
                to_raw(source, inspect_image(source, MADE[name][0]), small / "sink")
            assert list(small.iterdir()) == []
        with pytest.raises(StorageFull):
            from_raw(lab.samples["raw"], Format.QCOW2, small / "sink")
        assert list(small.iterdir()) == []
