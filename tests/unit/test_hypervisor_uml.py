"""User-mode Linux: a kernel's parameters, its overlays, and checks of overlays from elsewhere."""

from __future__ import annotations

import os
import struct
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import BootImage, DataDisk, VmConfig
from vmjobs.hypervisor.overlay import check
from vmjobs.hypervisor.uml.cow import create_overlay, update_base
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.hypervisor.uml.kernel_boot import allowed_parameters
from vmjobs.model import BootMethod

#: Parameters by which a UML kernel opens files of its node, starts programs there, or takes its memory.
OF_THE_NODE = [
    "hostfs=/",
    "ubd5=/etc/shadow",
    "ubd0=/etc/shadow",
    "udb=x",
    "eth0=slirp,,/bin/sh",
    "con1=xterm",
    "con=fd:0",
    "vec1:transport=tap,ifname=tap0",
    "ssl0=port:9000",
    "xterm=/bin/sh,-T,-e",
    "initrd=/etc/passwd",
    "iomem=x,/etc/shadow",
    "mconsole=notify:/tmp/x",
    "virtio_uml.device=/tmp/socket:1",
    "uml_dir=/tmp",
    "umid=vmjobs-other",
    "mem=100G",
    "debug",
    "--help",
]
SEVERAL = ["init=/a hostfs=/", 'init="/a hostfs=/"', "init=/a\nhostfs=/"]


@pytest.mark.parametrize("word", OF_THE_NODE + SEVERAL)
def test_an_image_cannot_reach_the_node_by_a_parameter(word: str) -> None:
    assert allowed_parameters((word,)) == []


@pytest.mark.parametrize(
    "word", ["init=/sbin/vmjobs-init", "ro", "rootfstype=ext4", "systemd.unit=x.target", "loglevel=4"]
)
def test_harmless_parameters_get_through(word: str) -> None:
    assert allowed_parameters((word,)) == [word]


@pytest.mark.parametrize("name", ["other-1", "vmjobs-a/b", "vmjobs-a b", "vmjobs-" + "x" * 64])
def test_names_that_uml_cannot_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(HypervisorError):
        UserModeLinux().start(_machine(tmp_path, name))


def test_too_many_disks(tmp_path: Path) -> None:
    disks = tuple(DataDisk(tmp_path / str(number)) for number in range(8))
    with pytest.raises(HypervisorError, match="7 data disks, not 8"):
        UserModeLinux().start(_machine(tmp_path, "vmjobs-1", disks))


@pytest.mark.parametrize("boot", [BootMethod.BIOS, BootMethod.UEFI])
def test_a_disk_that_boots_by_itself(boot: BootMethod, tmp_path: Path) -> None:
    vm = _machine(tmp_path, "vmjobs-1")
    with pytest.raises(HypervisorError, match=f"cannot boot by {boot}"):
        UserModeLinux().start(replace(vm, image=replace(vm.image, boot=boot)))


def test_no_such_program(tmp_path: Path) -> None:
    driver = UserModeLinux("no-such-uml")
    (tmp_path / "root").write_bytes(bytes(4096))
    with pytest.raises(HypervisorError, match="no-such-uml"):
        driver.start(_machine(tmp_path, "vmjobs-1"))
    result = driver.probe(5)
    assert not result.works
    assert "no-such-uml" in result.detail


def _machine(directory: Path, name: str, disks: tuple[DataDisk, ...] = ()) -> VmConfig:
    image, console = BootImage("", directory / "root"), directory / "console"
    return VmConfig(
        name, cpus=1, memory=64, image=image, disks=disks, console=console, workdir=directory
    )


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
