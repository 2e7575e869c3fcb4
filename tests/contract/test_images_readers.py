"""Images that our parsers accept: QEMU sees the same disk, and no more data."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from images.formats import Format, ImageDescription, inspect
from images.inspect import sandbox
from images.inspect.convert import to_raw
from images.inspect.sandbox import SandboxLimits
from tests.kit.disk_formats import MADE, Lab, damage
from vmjobs.errors import ImageRejected

ROUNDS = 40
LIMITS = SandboxLimits(seconds=60, cpu_seconds=30)
CONTAINERS = [name for name in MADE if name not in ("raw", "vdi-static", "vhdx-fixed", "qcow2-512")]


def qemu_says(path: Path, format_: str) -> int | None:
    """The size that QEMU sees; ``None`` where it sees no disk."""
    on_output = bytearray()
    node = {"driver": format_, "file": {"driver": "file", "filename": sandbox.SOURCE}}
    argv = ("qemu-img", "info", "-U", "--output=json", f"json:{json.dumps(node)}")
    try:
        with path.open("rb") as file:
            sandbox.run(argv, source=file, limits=LIMITS, on_output=on_output.extend)
    except ImageRejected:
        return None
    size = json.loads(on_output)["virtual-size"]
    assert isinstance(size, int)
    return size


def data_of(path: Path) -> int:
    """Bytes of a file in 4 KiB blocks that are not zeros."""
    count = 0
    with path.open("rb") as file:
        while block := file.read(4096):
            count += len(block) if block.strip(b"\0") else 0
    return count


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_is_let_in_is_what_qemu_sees(lab: Lab, tmp_path: Path, name: str) -> None:
    chance = random.Random(f"two readers {name}")
    sample, path, sink = lab.data(name), tmp_path / "fuzzed", tmp_path / "sink"
    format_ = MADE[name][0]
    for _ in range(ROUNDS):
        path.write_bytes(damage(bytearray(sample), chance))
        try:
            description = inspect(path, Format(format_))
        except ImageRejected:
            continue
        check(path, description, sink)


def check(path: Path, description: ImageDescription, sink: Path) -> None:
    size = qemu_says(path, str(description.format))
    assert size in (None, description.virtual_size)
    try:
        to_raw(path, description, sink)
    except ImageRejected as refused:
        assert refused.faults[0].code in {"conversion_failed", "raw_with_header"}, refused.message
        return
    assert size is not None
    assert sink.stat().st_size == size
    assert data_of(sink) <= description.allocated
