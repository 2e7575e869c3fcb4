"""``vmjobs image inspect`` and ``convert``, as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from images.commands import image
from tests.kit.disk_formats import SIZE, Lab, disk, qemu_img
from tests.kit.segments import compute_layout_of_bytes
from vmjobs.cli.common import config
from vmjobs.errors import VMJobsError


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMJOBS_DATA_DIR", str(tmp_path / "data"))
    config.cache_clear()


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(image, [str(word) for word in words])


def inspected(*words: str | Path) -> dict[str, Any]:
    done = call("inspect", "--json", *words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", ["raw", "qcow2-compressed", "vmdk-stream", "vdi-dynamic"])
def test_inspect_tells_what_a_file_is(lab: Lab, name: str) -> None:
    found = inspected("--digest", lab.samples[name])
    assert found["verdict"] == "admitted"
    assert found["format"] == name.partition("-")[0]
    assert found["virtual_size"] == SIZE
    assert found["digest"] == compute_layout_of_bytes(disk()).digest
    assert found["boot"]["table"] == "mbr"
    assert found["boot"]["boot"] == "kernel"
    assert found["boot"]["partition"] == 1
    quick = inspected(lab.samples[name])
    assert quick["digest"] is None
    assert quick["boot"] == found["boot"]


def test_inspect_says_it_in_a_table(lab: Lab) -> None:
    done = call("inspect", lab.samples["qcow2-v3"])
    assert done.exit_code == 0
    assert "--boot kernel --partition 1" in done.output
    assert "qcow2 3" in done.output


def test_what_is_refused_exits_with_65(tmp_path: Path) -> None:
    evil = tmp_path / "evil.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", "/etc/passwd", "-F", "raw", evil, "1M")
    done = call("inspect", evil)
    assert done.exit_code == 65
    assert "refused (backing_file)" in done.output
    done = call("inspect", "--json", evil)
    assert done.exit_code == 65
    assert json.loads(done.stdout)["code"] == "backing_file"
    done = call("convert", evil, tmp_path / "out.raw")
    assert isinstance(done.exception, VMJobsError)
    assert done.exception.exit_code == 65
    assert list(tmp_path.iterdir()) == [evil]


def test_inspect_holds_to_the_format_that_is_named(lab: Lab) -> None:
    assert call("inspect", "--format", "qcow2", lab.samples["qcow2-v3"]).exit_code == 0
    done = call("inspect", "--format", "raw", lab.samples["qcow2-v3"])
    assert done.exit_code == 65
    assert "raw_with_header" in done.output


def test_inspect_without_a_sandbox_says_all_but_how_it_boots(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = call("inspect", lab.samples["qcow2-v3"])
    assert done.exit_code == 0
    assert "not inspected" in done.output


def test_the_limit_of_the_settings_holds(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMJOBS_MAX_IMAGE_SIZE", "7")
    config.cache_clear()
    assert "disk_too_large" in call("inspect", lab.samples["qcow2-v3"]).output


def test_convert_takes_the_format_from_the_name(lab: Lab, tmp_path: Path) -> None:
    first = lab.samples["vdi-dynamic"]
    for name in ("a.qcow2", "b.vmdk", "c.vhdx", "d.vdi", "e.img"):
        done = call("convert", first, tmp_path / name)
        assert done.exit_code == 0, done.output
        first = tmp_path / name
    assert first.read_bytes() == disk()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_convert_compresses(lab: Lab, tmp_path: Path) -> None:
    assert call("convert", "--compress", lab.samples["raw"], tmp_path / "a.qcow2").exit_code == 0
    assert inspected(tmp_path / "a.qcow2")["features"] == ["compressed (zlib)"]
    done = call("convert", "--compress", lab.samples["raw"], tmp_path / "a.vdi")
    assert isinstance(done.exception, VMJobsError)
    assert not (tmp_path / "a.vdi").exists()


def test_convert_replaces_nothing_unasked(lab: Lab, tmp_path: Path) -> None:
    sink = tmp_path / "a.raw"
    sink.write_text("precious")
    done = call("convert", lab.samples["qcow2-v3"], sink)
    assert isinstance(done.exception, VMJobsError)
    assert sink.read_text() == "precious"
    assert call("convert", "--force", lab.samples["qcow2-v3"], sink).exit_code == 0
    assert sink.read_bytes() == disk()


@pytest.mark.parametrize("out", ["noending", "missing/a.raw", "a.iso"])
def test_convert_says_what_is_wrong_with_the_place(lab: Lab, tmp_path: Path, out: str) -> None:
    done = call("convert", lab.samples["qcow2-v3"], tmp_path / out)
    assert isinstance(done.exception, VMJobsError)
    assert done.exception.exit_code == 64
