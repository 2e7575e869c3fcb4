"""Parameters that a UML kernel gets, and those that it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import BootImage, DataDisk, VmConfig
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.hypervisor.uml.kernel_boot import allowed_parameters

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
