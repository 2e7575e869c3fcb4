"""What the Xen driver writes: domain XML, and the header of a saved VM."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import BootImage, DataDisk, VmConfig
from vmjobs.hypervisor.xen.domain_xml import domain_xml
from vmjobs.hypervisor.xen.saved import replace_xml
from vmjobs.model import BootMethod

VM = VmConfig(
    name="vmjobs-1",
    cpus=3,
    memory=700,
    image=BootImage(digest="", root=Path("/images/root"), kernel=Path("/images/kernel"), partition=1),
    disks=(DataDisk(Path("/run/job"), read_only=True), DataDisk(Path("/run/scratch"))),
    console=Path("/run/console"),
    workdir=Path("/run/work"),
)


def parsed(vm: VmConfig = VM, holder: int | None = None) -> ET.Element:
    return ET.fromstring(domain_xml(vm, Path("/run/overlay"), holder))  # noqa: S314


def test_a_vm_is_paravirtualized_and_has_its_disks_in_order() -> None:
    domain = parsed()
    assert (domain.get("type"), domain.findtext("os/type")) == ("xen", "linux")
    assert "root=/dev/xvda1" in (domain.findtext("os/cmdline") or "").split()
    disks = domain.findall("devices/disk")
    files = [disk.find("source").get("file") for disk in disks]
    assert files == ["/run/overlay", "/run/job", "/run/scratch"]
    assert [disk.find("target").get("dev") for disk in disks] == ["xvda", "xvdb", "xvdc"]
    assert [disk.find("readonly") is not None for disk in disks] == [False, True, False]


def test_a_disk_with_a_boot_loader_starts_by_grub() -> None:
    image = BootImage(digest="", root=Path("/images/root"), boot=BootMethod.BIOS)
    system = parsed(replace(VM, image=image)).find("os")
    assert [child.tag for child in system] == ["type", "kernel"]
    assert (system.findtext("kernel") or "").endswith("x86_64-xen.bin")


def test_only_a_restart_keeps_the_vm() -> None:
    """By that it is told from a power-off."""
    domain = parsed()
    events = [domain.findtext(f"on_{event}") for event in ("poweroff", "reboot", "crash")]
    assert events == ["destroy", "preserve", "destroy"]


def test_a_card_names_the_process_that_holds_its_network() -> None:
    assert parsed().find("devices/interface") is None
    target = parsed(holder=4242).find("devices/interface/target")
    assert target.get("dev") == "vmj4242"


def test_an_image_without_a_kernel_is_refused() -> None:
    with pytest.raises(HypervisorError, match="no kernel that xen could boot"):
        parsed(replace(VM, image=replace(VM.image, kernel=None)))


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_a_disk_that_xen_cannot_use_is_refused(name: str) -> None:
    with pytest.raises(HypervisorError, match="a comma or a colon in its path"):
        parsed(replace(VM, disks=(DataDisk(Path("/run") / name),)))


def saved(xml: bytes, magic: bytes = b"libvirt-xml\n \0 \r") -> bytes:
    return struct.pack("=16sII40x", magic, 2, len(xml)) + xml + b"memory" * 1000


def test_the_xml_of_a_saved_vm_is_replaced_and_its_memory_kept(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    file.write_bytes(saved(b"<domain>old</domain>\0"))
    for text in ("<domain>a longer one</domain>", "<a/>"):
        replace_xml(file, text)
        assert file.read_bytes() == saved(text.encode() + b"\0")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "content",
    [b"", bytes(4096), saved(b"", b"LibvirtQemudSave"), saved(b"x" * (2 << 20))],
    ids=["empty", "zeros", "of another hypervisor", "too long"],
)
def test_what_is_no_saved_vm_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "memory"
    file.write_bytes(content)
    with pytest.raises(HypervisorError, match="is no saved Xen VM"):
        replace_xml(file, "<domain/>")
    assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]
