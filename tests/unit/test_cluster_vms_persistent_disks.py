"""Persistent disks of cluster VMs: made once and completely, and never replaced."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from vmjobs.agent.cluster_vms import persistent_disks
from vmjobs.agent.vm.job_disk import SIZE_UNIT
from vmjobs.errors import HypervisorError

SIZE = 64 * SIZE_UNIT
OWNER, ANOTHER = "0" * 32, "1" * 32
IMAGE, OTHER_IMAGE = "sha256:" + "1" * 64, "sha256:" + "2" * 64


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Disks made by an ordinary user, whose PATH has no sbin directory."""
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin:/bin")
    persistent_disks.make(tmp_path / "disks", OWNER, SIZE)
    return tmp_path / "disks"


def test_an_empty_disk_takes_no_room_and_is_sound(disks: Path) -> None:
    disk = disks / persistent_disks.SCRATCH_DISK
    assert disk.stat().st_size == SIZE
    assert disk.stat().st_blocks * 512 < SIZE_UNIT
    subprocess.run(["/sbin/e2fsck", "-fn", disk], check=True, capture_output=True)
    persistent_disks.check(disks, OWNER, IMAGE)
    assert list(disks.parent.iterdir()) == [disks]


def _cut_short(disk: Path) -> None:
    os.truncate(disk, SIZE - SIZE_UNIT)


def _replace(disk: Path) -> None:
    persistent_disks.make(disk.parents[1] / "others", ANOTHER, SIZE)
    (disk.parents[1] / "others" / persistent_disks.SCRATCH_DISK).replace(disk)


@pytest.mark.parametrize(
    ("fault", "message"),
    [(Path.unlink, "is missing"), (_cut_short, "was truncated"), (_replace, "is another VM's")],
)
def test_a_disk_that_is_not_the_one_is_left_alone(
    disks: Path, fault: Callable[[Path], None], message: str
) -> None:
    disk = disks / persistent_disks.SCRATCH_DISK
    fault(disk)
    before = disk.read_bytes() if disk.exists() else None
    persistent_disks.make(disks, OWNER, SIZE)
    with pytest.raises(HypervisorError, match=f"{message}.*restore it from a backup, or remove"):
        persistent_disks.check(disks, OWNER, IMAGE)
    assert (disk.read_bytes() if disk.exists() else None) == before


def test_a_disk_that_was_not_made_here_is_for_the_guest_to_judge(disks: Path) -> None:
    disk = disks / persistent_disks.SCRATCH_DISK
    for uuid in ("random", "clear"):
        subprocess.run(["/sbin/tune2fs", "-U", uuid, disk], check=True, capture_output=True)
        persistent_disks.check(disks, OWNER, IMAGE)
    disk.write_bytes(b"swap, perhaps")
    persistent_disks.check(disks, OWNER, IMAGE)


def test_a_disk_on_a_file_system_that_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "disks").symlink_to("large/disks")
    persistent_disks.make(tmp_path / "disks", OWNER, SIZE)
    with pytest.raises(HypervisorError, match="is missing"):
        persistent_disks.check(tmp_path / "disks", OWNER, IMAGE)
    assert [path.name for path in tmp_path.iterdir()] == ["disks"]


@pytest.mark.parametrize("step", ["create_blank_disk", "make_file_system", "sync_directory"])
def test_a_disk_is_whole_or_not_there_whenever_the_agent_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    class Killed(BaseException):
        pass

    do = getattr(persistent_disks, step)

    def die_after(*args: object, **named: object) -> None:
        do(*args, **named)
        raise Killed

    with monkeypatch.context() as dying, pytest.raises(Killed):
        dying.setattr(persistent_disks, step, die_after)
        persistent_disks.make(tmp_path / "disks", OWNER, SIZE)
    assert not (tmp_path / "disks").exists()
    persistent_disks.make(tmp_path / "disks", OWNER, SIZE)
    persistent_disks.check(tmp_path / "disks", OWNER, IMAGE)
    assert [path.name for path in tmp_path.iterdir()] == ["disks"]


def test_a_root_that_was_there_is_never_replaced(disks: Path) -> None:
    overlay = persistent_disks.root_overlay(disks, IMAGE)
    noted = overlay.with_suffix(".made")
    lost = f"the persistent disk {overlay} is missing.*restore it from a backup, or remove {noted}"
    for _ in range(2):
        persistent_disks.check(disks, OWNER, IMAGE)  # it never booted
        overlay.touch()  # a kernel died before it wrote anything
        persistent_disks.check(disks, OWNER, IMAGE)
        overlay.unlink()
        persistent_disks.check(disks, OWNER, IMAGE)

        overlay.write_bytes(b"root")  # the agent died before it was recorded
        persistent_disks.check(disks, OWNER, IMAGE)
        overlay.unlink()
        with pytest.raises(HypervisorError, match=lost):
            persistent_disks.check(disks, OWNER, IMAGE)
        overlay.touch()
        with pytest.raises(HypervisorError, match=lost):
            persistent_disks.check(disks, OWNER, IMAGE)
        persistent_disks.remove_roots(disks, keep=OTHER_IMAGE)
    persistent_disks.remove_roots(disks, keep=OTHER_IMAGE)


def test_each_image_has_a_root_of_its_own(disks: Path) -> None:
    (disks / "root.overlay").write_bytes(b"of an earlier release")
    persistent_disks.check(disks, OWNER, IMAGE)
    mine, other = (persistent_disks.root_overlay(disks, image) for image in (IMAGE, OTHER_IMAGE))
    assert mine.read_bytes() == b"of an earlier release"
    persistent_disks.check(disks, OWNER, OTHER_IMAGE)
    assert not other.exists()
    other.write_bytes(b"root")
    persistent_disks.record_root(disks, OTHER_IMAGE)
    persistent_disks.remove_roots(disks, keep=OTHER_IMAGE)
    assert sorted(path.name for path in disks.glob("root*")) == sorted(
        [other.name, other.with_suffix(".made").name]
    )


@pytest.mark.parametrize("step", ["os.fsync", "Path.touch", "sync_directory"])
def test_a_root_is_noted_or_there_whenever_the_agent_dies(
    disks: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def die(*_: object, **_named: object) -> None:
        raise KeyboardInterrupt

    overlay = persistent_disks.root_overlay(disks, IMAGE)
    overlay.write_bytes(b"root")
    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(f"vmjobs.agent.cluster_vms.persistent_disks.{step}", die)
        persistent_disks.record_root(disks, IMAGE)
    persistent_disks.check(disks, OWNER, IMAGE)
    overlay.unlink()
    with pytest.raises(HypervisorError, match="is missing"):
        persistent_disks.check(disks, OWNER, IMAGE)
