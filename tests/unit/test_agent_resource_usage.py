"""Resource usage of a run: what it moved and used is counted, and never decreases."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from vmjobs.agent.run.resource_usage import ResourceUsage, measure_files, measure_vm
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import Hypervisor, VmUsage
from vmjobs.model import MIB, StreamName


class Driver:
    """A driver that reports ``said``, or fails if it is None."""

    said: VmUsage | None = None

    def usage(self, name: str) -> VmUsage:
        if self.said is None:
            raise HypervisorError("it does not answer")
        return self.said


def test_what_a_vm_used_stays_when_it_is_gone_or_not_to_be_asked() -> None:
    usage, driver = ResourceUsage(), Driver()

    def count(said: VmUsage | None) -> tuple[float, int]:
        driver.said = said
        measure_vm(usage, cast(Hypervisor, driver), "it", 100 * MIB)
        return usage.cpu_seconds, usage.bytes.get("memory", -1)

    assert count(None) == (0.0, -1)
    assert count(VmUsage(1.5, 60 * MIB)) == (1.5, 60 * MIB)
    assert count(VmUsage()) == (1.5, 60 * MIB)
    assert count(None) == (1.5, 60 * MIB)
    assert count(VmUsage(2.0, 150 * MIB)) == (2.0, 100 * MIB), "the rest is the hypervisor's"


def test_files_count_by_what_is_in_them(tmp_path: Path) -> None:
    """Sparse disks count by the space they take on the node; files elsewhere do not count."""
    (tmp_path / "image").write_bytes(b"x" * MIB)
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine" / "base").symlink_to(tmp_path / "image")
    (tmp_path / "machine" / "overlay").write_bytes(b"x" * 65536)
    with (tmp_path / "scratch.disk").open("wb") as disk:
        disk.truncate(64 * MIB)
        disk.write(b"x" * 4096)
    for name in ("console", "out", "err"):
        (tmp_path / f"stream-{name}").write_bytes(b"x" * len(name))
    usage = ResourceUsage()

    def stream(name: StreamName) -> Path:
        return tmp_path / f"stream-{name}"

    measure_files(usage, tmp_path, stream)
    assert 69632 <= usage.bytes.pop("disk") < 2 * 69632
    assert usage.bytes == {"console": 7, "log": 6}
    (tmp_path / "stream-out").unlink()
    measure_files(usage, tmp_path, stream)
    assert usage.bytes["log"] == 6
