"""``vmjobs image inspect`` and ``convert``, as typed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.kit.cli import Run
from tests.kit.disk_formats import SIZE, Lab, disk, qemu_img
from tests.kit.segments import compute_layout_of_bytes


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Run) -> Run:
    """``vmjobs image`` with a data directory of its own."""
    monkeypatch.setenv("VMJOBS_DATA_DIR", str(tmp_path / "data"))
    return partial(typed, "image")


def test_inspect_tells_what_a_file_is(lab: Lab, call: Run) -> None:
    sample = lab.samples["qcow2-compressed"]
    found = call("inspect", "--json", "--digest", sample).json
    assert found["verdict"] == "admitted"
    assert found["format"] == "qcow2"
    assert found["virtual_size"] == SIZE
    assert found["digest"] == compute_layout_of_bytes(disk()).digest
    assert found["boot"]["table"] == "mbr"
    assert found["boot"]["boot"] == "kernel"
    assert found["boot"]["partition"] == 1
    quick = call("inspect", "--json", sample).json
    assert quick["digest"] is None
    assert quick["boot"] == found["boot"]


def test_inspect_says_it_in_a_table(lab: Lab, call: Run) -> None:
    done = call("inspect", lab.samples["qcow2-v3"], code=0)
    assert "--boot kernel --partition 1" in done.out
    assert "qcow2 3" in done.out


def test_what_is_refused_exits_with_65(call: Run, tmp_path: Path) -> None:
    evil = tmp_path / "evil.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", "/etc/passwd", "-F", "raw", evil, "1M")
    done = call("inspect", evil, code=65)
    assert "refused (backing_file)" in done.out
    done = call("inspect", "--json", evil, code=65)
    assert json.loads(done.out)["code"] == "backing_file"
    done = call("convert", evil, tmp_path / "out.raw", code=65)
    assert list(tmp_path.iterdir()) == [evil]


def test_inspect_holds_to_the_format_that_is_named(lab: Lab, call: Run) -> None:
    assert call("inspect", "--format", "qcow2", lab.samples["qcow2-v3"]).code == 0
    done = call("inspect", "--format", "raw", lab.samples["qcow2-v3"], code=65)
    assert "raw_with_header" in done.out


def test_inspect_without_a_sandbox_says_all_but_how_it_boots(
    lab: Lab, call: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = call("inspect", lab.samples["qcow2-v3"], code=0)
    assert "not inspected" in done.out


def test_the_limit_of_the_settings_holds(lab: Lab, call: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMJOBS_MAX_IMAGE_SIZE", "7")
    assert "disk_too_large" in call("inspect", lab.samples["qcow2-v3"]).out


def test_convert_takes_the_format_from_the_name(lab: Lab, call: Run, tmp_path: Path) -> None:
    first = lab.samples["vdi-dynamic"]
    for name in ("a.qcow2", "b.vmdk", "c.vhdx", "d.vdi", "e.img"):
        call("convert", first, tmp_path / name, code=0)
        first = tmp_path / name
    assert first.read_bytes() == disk()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_convert_compresses(lab: Lab, call: Run, tmp_path: Path) -> None:
    assert call("convert", "--compress", lab.samples["raw"], tmp_path / "a.qcow2").code == 0
    assert call("inspect", "--json", tmp_path / "a.qcow2").json["features"] == ["compressed (zlib)"]
    call("convert", "--compress", lab.samples["raw"], tmp_path / "a.vdi", code=65)
    assert not (tmp_path / "a.vdi").exists()


def test_convert_replaces_nothing_unasked(lab: Lab, call: Run, tmp_path: Path) -> None:
    sink = tmp_path / "a.raw"
    sink.write_text("precious")
    call("convert", lab.samples["qcow2-v3"], sink, code=64)
    assert sink.read_text() == "precious"
    assert call("convert", "--force", lab.samples["qcow2-v3"], sink).code == 0
    assert sink.read_bytes() == disk()


@pytest.mark.parametrize("out", ["noending", "missing/a.raw", "a.iso"])
def test_convert_says_what_is_wrong_with_the_place(
    lab: Lab, call: Run, tmp_path: Path, out: str
) -> None:
    call("convert", lab.samples["qcow2-v3"], tmp_path / out, code=64)
