"""Writes libvirt's domain XML for a paravirtualized Xen VM. Pure functions: values in, text out."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Final

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import VmConfig
from vmjobs.hypervisor.libvirt.domain_xml import Board, add_kernel, add_text, new_domain
from vmjobs.hypervisor.network.guest_network import MAC
from vmjobs.model import BootMethod

BOARD: Final = Board("x86_64", "xenpv", console="hvc0", disk="xvd", hypervisors="xen")
#: Run by the toolstack as root when a VM gets its card: puts it into the VM's network.
CARD_SCRIPT: Final = Path("/usr/libexec/vmjobs/xen-card")
#: Prefix of a card's name in the node; the rest is the process that holds its network.
CARD_PREFIX: Final = "vmj"
#: GRUB as a guest's kernel: it starts what the menu on the VM's root disk says.
GRUB: Final = Path("/usr/lib/grub-xen/grub-x86_64-xen.bin")


def domain_xml(vm: VmConfig, overlay: Path, holder: int | None) -> str:
    """Return the domain XML of a VM.

    Args:
        overlay: qcow2 file over the VM's root disk.
        holder: number of the process that holds the VM's network; None: it has none.

    Raises:
        HypervisorError: the image has no kernel, or Xen cannot use the path of a disk.
    """
    domain = new_domain(vm, {"type": "xen"})
    system = ET.SubElement(domain, "os")
    kind = {"arch": BOARD.architecture, "machine": BOARD.machine_type}
    ET.SubElement(system, "type", kind).text = "linux"
    if vm.image.boot is BootMethod.BIOS:
        add_text(system, "kernel", str(GRUB))
    else:
        add_kernel(system, vm, BOARD)
    ET.SubElement(domain, "clock", {"offset": "utc"})
    add_text(domain, "on_poweroff", "destroy")
    # libvirt reports a restart like a power-off. So a VM that restarts is kept, and known by that.
    add_text(domain, "on_reboot", "preserve")
    add_text(domain, "on_crash", "destroy")
    devices = ET.SubElement(domain, "devices")
    _disk(devices, "a", overlay, "qcow2", read_only=False)
    for letter, disk in zip("bcdefghijklmnop", vm.disks, strict=False):
        _disk(devices, letter, disk.path, "raw", read_only=disk.read_only)
    if holder is not None:
        card = ET.SubElement(devices, "interface", {"type": "ethernet"})
        ET.SubElement(card, "mac", {"address": MAC})
        ET.SubElement(card, "script", {"path": str(CARD_SCRIPT)})
        ET.SubElement(card, "target", {"dev": f"{CARD_PREFIX}{holder}"})
    console = ET.SubElement(devices, "console", {"type": "pty"})
    ET.SubElement(console, "target", {"type": "xen", "port": "0"})
    return ET.tostring(domain, encoding="unicode")


def _disk(devices: ET.Element, letter: str, path: Path, kind: str, *, read_only: bool) -> None:
    if {",", ":"} & set(str(path)):  # the guest would wait for the disk for ever
        message = f"Xen cannot use the disk {path}: there is a comma or a colon in its path"
        raise HypervisorError(message, hint="choose another state_dir")
    # As a read-only disk it fails in QEMU 7.2, which asks for write access.
    device = "cdrom" if read_only else "disk"
    disk = ET.SubElement(devices, "disk", {"type": "file", "device": device})
    ET.SubElement(disk, "driver", {"name": "qemu", "type": kind})
    ET.SubElement(disk, "source", {"file": str(path.absolute())})
    ET.SubElement(disk, "target", {"dev": f"{BOARD.disk}{letter}", "bus": "xen"})
    if read_only:
        ET.SubElement(disk, "readonly")
