"""The domain XML of a VM."""

from __future__ import annotations

import socket
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import BootImage, DataDisk, Network, VmConfig, VmLimits
from vmjobs.hypervisor.libvirt.domain_xml import QEMU_NAMESPACE, board, domain_xml
from vmjobs.hypervisor.libvirt.firmware import Firmware
from vmjobs.model import BootMethod, NetworkMode

IMAGE = BootImage(
    digest="",
    root=Path("/images/root"),
    kernel=Path("/images/kernel"),
    initrd=Path("/images/initrd"),
    cmdline=("init=/sbin/vmjobs-init", "root=/dev/sdz"),
)
MACHINE = VmConfig(
    name="vmjobs-1",
    cpus=3,
    memory=700,
    image=IMAGE,
    disks=(DataDisk(Path("/run/job"), read_only=True), DataDisk(Path("/run/scratch"))),
    console=Path("/run/a,b/console"),
    workdir=Path("/run/work"),
    cmdline=("extra",),
)


def parsed(
    machine: VmConfig = MACHINE, uefi: Firmware | None = None, nbd: Path | None = None
) -> ET.Element:
    text = domain_xml(machine, "qemu", Path("/run/overlay"), board("x86_64"), uefi, nbd)
    return ET.fromstring(text)  # noqa: S314


def arguments(domain: ET.Element) -> list[str]:
    return [arg.get("value", "") for arg in domain.iter(f"{{{QEMU_NAMESPACE}}}arg")]


def test_name_size_and_end_of_life() -> None:
    domain = parsed()
    assert domain.get("type") == "qemu"
    assert domain.findtext("name") == "vmjobs-1"
    assert (domain.findtext("memory"), domain.findtext("vcpu")) == ("700", "3")
    for event in ("on_poweroff", "on_reboot", "on_crash"):
        assert domain.findtext(event) == "destroy"


def test_all_disks_share_one_limit() -> None:
    assert parsed().find(".//iotune") is None
    assert parsed(replace(MACHINE, limits=VmLimits(cpu_percent=30))).find(".//iotune") is None
    disks = parsed(replace(MACHINE, limits=VmLimits(disk_bytes=5_000_000))).findall(".//disk")
    assert len(disks) == 3
    for disk in disks:
        assert disk.findtext("iotune/total_bytes_sec") == "5000000"
        assert disk.findtext("iotune/group_name") == "disks"


def test_our_kernel_parameters_come_last_and_so_win() -> None:
    words = (parsed().findtext("os/cmdline") or "").split()
    assert words[:3] == ["init=/sbin/vmjobs-init", "root=/dev/sdz", "extra"]
    own = ["root=/dev/vda", "rw", "console=ttyS0", "no_timer_check", "panic=-1", "vmjobs=1"]
    assert words[3:] == own


def test_what_is_below_the_overlay_is_said_and_never_probed() -> None:
    below = parsed().find("devices/disk/backingStore")
    assert below.get("type") == "file"
    by_nbd = parsed(nbd=Path("/run/work/nbd.sock")).find("devices/disk/backingStore")
    assert by_nbd.get("type") == "network"
    host = by_nbd.find("source[@protocol='nbd']/host")
    assert host.attrib == {"transport": "unix", "socket": "/run/work/nbd.sock"}
    for element in (below, by_nbd):
        assert element.find("format").get("type") == "raw"


@pytest.mark.parametrize("method", [BootMethod.BIOS, BootMethod.UEFI])
def test_firmware_boots_the_disk(method: BootMethod) -> None:
    image = replace(IMAGE, boot=method, kernel=None, initrd=None)
    uefi = Firmware(Path("/fw/code"), Path("/run/work/variables"))
    given = uefi if method is BootMethod.UEFI else None
    domain = parsed(replace(MACHINE, image=image), uefi=given)
    assert domain.find("os/kernel") is None
    orders = [boot.get("order") for boot in domain.findall("devices/disk/boot")]
    assert orders == (["1"] if given else ["1", "2", "3"]), "a BIOS has all disks as drives"
    assert domain.find("devices/video") is not None
    assert domain.findtext("os/loader") == (str(uefi.code) if given else None)
    assert domain.findtext("os/nvram") == (str(uefi.variables) if given else None)


def test_kvm_passes_the_processor_through_but_what_is_hidden() -> None:
    text = domain_xml(MACHINE, "kvm", Path("/o"), board("x86_64"), hidden_features=("md-clear",))
    feature = ET.fromstring(text).find("cpu[@mode='host-passthrough']/feature")  # noqa: S314
    assert feature.attrib == {"policy": "disable", "name": "md-clear"}


def test_what_cannot_be_described() -> None:
    with pytest.raises(HypervisorError, match="brings no kernel"):  # the disk is no substitute
        parsed(replace(MACHINE, image=replace(IMAGE, kernel=None)))
    with pytest.raises(HypervisorError, match="vax"):
        board("vax")


def test_the_root_file_system_may_be_in_a_partition() -> None:
    domain = parsed(replace(MACHINE, image=replace(IMAGE, partition=2)))
    assert "root=/dev/vda2" in (domain.findtext("os/cmdline") or "").split()


def test_every_format_is_pinned() -> None:
    disks = parsed().findall("devices/disk")
    assert [disk.find("driver").get("type") for disk in disks] == ["qcow2", "raw", "raw"]
    assert [disk.find("readonly") is not None for disk in disks] == [False, True, False]
    assert [disk.find("target").get("dev") for disk in disks] == ["vda", "vdb", "vdc"]


def test_console_is_appended_and_commas_do_no_harm() -> None:
    assert "file,id=console0,path=/run/a,,b/console,append=on" in arguments(parsed())


def test_a_card_only_where_there_is_a_network() -> None:
    assert "-netdev" not in arguments(parsed())
    network = Network(NetworkMode.REPOSITORY, (3, 4), {}, socket.socket(), 1500)
    words = arguments(parsed(replace(MACHINE, network=network)))
    assert "tap,id=net0,ifname=tap0,script=no,downscript=no" in words


def test_hostile_text_stays_text() -> None:
    evil = replace(IMAGE, cmdline=("</cmdline><devices/>", "a&b"))
    domain = parsed(replace(MACHINE, image=evil))
    assert (domain.findtext("os/cmdline") or "").startswith("</cmdline><devices/> a&b ")
    assert len(domain.findall("devices")) == 1
