"""Writes libvirt's domain XML for a VM. Pure functions: values in, text out.

QEMU gets the console and the network card directly. libvirt would give a console file to virtlogd,
which truncates and rotates it at 2 MiB, and would open the tap device in its own network namespace.
"""

from __future__ import annotations

import platform
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import BootImage, VmConfig
from vmjobs.hypervisor.libvirt.firmware import Firmware
from vmjobs.hypervisor.libvirt.qemu_sandbox import Emulator
from vmjobs.hypervisor.network.guest_network import MAC, MTU
from vmjobs.hypervisor.network.namespaces import TAP
from vmjobs.model import BootMethod

QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"
VMJOBS_NAMESPACE = "urn:vmjobs:machine:1"

_UUIDS = uuid.uuid5(uuid.NAMESPACE_URL, VMJOBS_NAMESPACE)
#: The network card, at an address behind everything that libvirt places by itself.
_PCI_CARD = "virtio-net-pci,romfile=,bus=pcie.0,addr=0x1e"
_CHANNEL_CARD = "virtio-net-ccw,devno=fe.0.00ff"


@dataclass(frozen=True)
class Board:
    """An architecture's machine type, and its serial console.

    kernel: parameters that its kernels get. disk: prefix of its disks' names. hypervisors: those that
    have it. acpi: it has ACPI. gic: version of its interrupt controller. panic: a device that reports
    panics. card: the network card.
    """

    architecture: str
    machine_type: str
    console: str
    kernel: tuple[str, ...] = ()
    disk: str = "vd"
    hypervisors: str = "kvm or qemu"
    acpi: bool = False
    gic: str = ""
    panic: str = ""
    card: str = _PCI_CARD


_BOARDS = {
    # If the emulator has to wait for a processor, a kernel finds that its timer does not work, and
    # panics (check_timer in arch/x86/kernel/apic/io_apic.c).
    "x86_64": Board("x86_64", "q35", "ttyS0", ("no_timer_check",), acpi=True, panic="isa"),
    # Version 2 of its interrupt controller is for at most eight processors.
    "aarch64": Board("aarch64", "virt", "ttyAMA0", gic="3"),
    "s390x": Board("s390x", "s390-ccw-virtio", "ttysclp0", panic="s390", card=_CHANNEL_CARD),
}


def board(architecture: str = "") -> Board:
    """Return the board for an architecture; empty: the node's own.

    Raises:
        HypervisorError: the architecture is not supported.
    """
    wanted = architecture or platform.machine()
    if wanted not in _BOARDS:
        raise HypervisorError(f"cannot run VMs of the architecture {wanted}")
    return _BOARDS[wanted]


def domain_xml(
    vm: VmConfig,
    domain_type: str,
    overlay: Path,
    board_model: Board,
    uefi: Firmware | None = None,
    nbd: Path | None = None,
    emulator: Emulator | None = None,
    hidden_features: Iterable[str] = (),
) -> str:
    """Return the domain XML of a VM.

    Args:
        domain_type: ``kvm``, ``qemu``, or ``test`` for libvirt's own test driver.
        overlay: qcow2 file over the VM's root disk.
        board_model: as from :func:`board`.
        uefi: the VM's own firmware, if it boots by UEFI.
        nbd: Unix socket of the root disk's NBD server, if the disk is incomplete on this node.
        emulator: the program that runs it; None: libvirt's own choice.
        hidden_features: features of the processor that the guest does not see.

    Raises:
        HypervisorError: the image boots by a kernel, and has none.
    """
    domain = new_domain(vm, {"type": domain_type, "xmlns:qemu": QEMU_NAMESPACE})
    domain.append(_os(vm, board_model, uefi))
    features = ET.SubElement(domain, "features")
    if board_model.acpi:
        ET.SubElement(features, "acpi")
    if board_model.gic:
        ET.SubElement(features, "gic", {"version": board_model.gic})
    mode = "host-passthrough" if domain_type == "kvm" else "maximum"
    processor = ET.SubElement(domain, "cpu", {"mode": mode})
    for name in hidden_features:
        ET.SubElement(processor, "feature", {"policy": "disable", "name": name})
    ET.SubElement(domain, "clock", {"offset": "utc"})
    for event in ("on_poweroff", "on_reboot", "on_crash"):
        add_text(domain, event, "destroy")
    domain.append(_devices(vm, board_model, overlay, nbd, emulator))
    ET.SubElement(domain, "seclabel", {"type": "none"})
    domain.append(_qemu_arguments(vm, board_model, emulator))
    return ET.tostring(domain, encoding="unicode")


def new_domain(vm: VmConfig, attributes: dict[str, str]) -> ET.Element:
    """Return a domain with its name, memory and processors. attributes: of its element."""
    domain = ET.Element("domain", attributes)
    add_text(domain, "name", vm.name)
    add_text(domain, "uuid", str(uuid.uuid5(_UUIDS, vm.name)))  # both identify a saved VM
    metadata = ET.SubElement(domain, "metadata")
    ET.SubElement(metadata, "vmjobs:machine", {"xmlns:vmjobs": VMJOBS_NAMESPACE, "name": vm.name})
    ET.SubElement(domain, "memory", {"unit": "MiB"}).text = str(vm.memory)
    add_text(domain, "vcpu", str(vm.cpus))
    return domain


def kernel_parameters(image: BootImage, board_model: Board, more: Iterable[str] = ()) -> list[str]:
    """Return the kernel's parameters, ours last, so that they win. more: of the VM."""
    return [
        *image.cmdline,
        *more,
        f"root=/dev/{board_model.disk}a{image.partition or ''}",
        "rw",
        f"console={board_model.console}",
        *board_model.kernel,
        "panic=-1",
        "vmjobs=1",
    ]


def _os(vm: VmConfig, board_model: Board, uefi: Firmware | None) -> ET.Element:
    element = ET.Element("os")
    ET.SubElement(
        element, "type", {"arch": board_model.architecture, "machine": board_model.machine_type}
    ).text = "hvm"
    if vm.image.boot is not BootMethod.KERNEL:
        if uefi is not None:
            loader = ET.SubElement(element, "loader", {"readonly": "yes", "type": "pflash"})
            loader.text = str(uefi.code.absolute())
            add_text(element, "nvram", str(uefi.variables.absolute()))
        return element
    add_kernel(element, vm, board_model)
    return element


def add_kernel(element: ET.Element, vm: VmConfig, board_model: Board) -> None:
    """Add the image's kernel to an ``os`` element.

    Raises:
        HypervisorError: the image brings none.
    """
    if vm.image.kernel is None:
        raise HypervisorError(f"the image brings no kernel that {board_model.hypervisors} could boot")
    add_text(element, "kernel", str(vm.image.kernel.absolute()))
    if vm.image.initrd is not None:
        add_text(element, "initrd", str(vm.image.initrd.absolute()))
    add_text(element, "cmdline", " ".join(kernel_parameters(vm.image, board_model, vm.cmdline)))


def _devices(
    vm: VmConfig, board_model: Board, overlay: Path, nbd: Path | None, emulator: Emulator | None
) -> ET.Element:
    devices = ET.Element("devices")
    if emulator is not None:
        add_text(devices, "emulator", str(emulator.path))
    cache = "unsafe" if vm.overlay is None else "writeback"
    root = _disk(overlay, "qcow2", "vda", cache, read_only=False)
    root.append(_backing(vm, nbd))
    disks = [root]
    for letter, disk in zip("bcdefghijklmnop", vm.disks, strict=False):
        path, target = disk.path.absolute(), f"vd{letter}"
        disks.append(_disk(path, "raw", target, cache, read_only=disk.read_only))
    for number, element in enumerate(disks, 1):
        _throttle(element, vm)
        if vm.image.boot is BootMethod.BIOS or (number == 1 and vm.image.boot is BootMethod.UEFI):
            # A BIOS makes drives of disks that it might boot from; programs that use its drives
            # need the other disks, too.
            ET.SubElement(element, "boot", {"order": str(number)})
        devices.append(element)
    ET.SubElement(devices, "controller", {"type": "usb", "model": "none"})
    ET.SubElement(devices, "memballoon", {"model": "none"})
    if vm.image.boot is not BootMethod.KERNEL:
        # Boot loaders and installers expect a screen.
        ET.SubElement(ET.SubElement(devices, "video"), "model", {"type": "vga"})
    rng = ET.SubElement(devices, "rng", {"model": "virtio"})
    ET.SubElement(rng, "backend", {"model": "random"}).text = "/dev/urandom"
    if board_model.panic:
        ET.SubElement(devices, "panic", {"model": board_model.panic})
    return devices


def _backing(vm: VmConfig, nbd: Path | None) -> ET.Element:
    """The layer below the overlay, so that libvirt never reads the image to find it."""
    backing = ET.Element("backingStore", {"type": "file" if nbd is None else "network"})
    ET.SubElement(backing, "format", {"type": "raw"})
    if nbd is None:
        ET.SubElement(backing, "source", {"file": str(vm.image.root.absolute())})
    else:
        source = ET.SubElement(backing, "source", {"protocol": "nbd"})
        ET.SubElement(source, "host", {"transport": "unix", "socket": str(nbd)})
    return backing


def _disk(path: Path, kind: str, target: str, cache: str, *, read_only: bool) -> ET.Element:
    disk = ET.Element("disk", {"type": "file", "device": "disk"})
    # Disks that are discarded with their VM need not be synced. Errors go to the guest; pausing it
    # instead would leave it hanging.
    driver = {"name": "qemu", "type": kind, "cache": cache, "discard": "unmap"}
    ET.SubElement(disk, "driver", {**driver, "error_policy": "report"})
    ET.SubElement(disk, "source", {"file": str(path)})
    ET.SubElement(disk, "target", {"dev": target, "bus": "virtio"})
    if read_only:
        ET.SubElement(disk, "readonly")
    return disk


def _throttle(disk: ET.Element, vm: VmConfig) -> None:
    """All disks of a VM share one limit, which QEMU enforces: no cgroup is needed."""
    if vm.limits is not None and vm.limits.disk_bytes is not None:
        throttle = ET.SubElement(disk, "iotune")
        add_text(throttle, "total_bytes_sec", str(vm.limits.disk_bytes))
        add_text(throttle, "group_name", "disks")


def _qemu_arguments(vm: VmConfig, board_model: Board, emulator: Emulator | None) -> ET.Element:
    console = f"file,id=console0,path={_escaped(vm.console.absolute())},append=on"
    arguments = ["-chardev", console, "-serial", "chardev:console0"]
    if vm.image.boot is BootMethod.BIOS:
        # The BIOS copies the screen to the serial console, where boot loaders write to the screen.
        arguments += ["-machine", "graphics=off"]
    if vm.network is not None:
        netdev = f"tap,id=net0,ifname={TAP},script=no,downscript=no"
        card = f"{board_model.card},netdev=net0,mac={MAC},host_mtu={MTU}"
        arguments += ["-netdev", netdev, "-device", card]
    element = ET.Element("qemu:commandline")
    for argument in arguments:
        ET.SubElement(element, "qemu:arg", {"value": argument})
    for name, value in emulator.env.items() if emulator else ():
        ET.SubElement(element, "qemu:env", {"name": name, "value": value})
    return element


def _escaped(path: Path) -> str:
    """In QEMU's options a comma ends a value, and two commas stand for one."""
    return str(path).replace(",", ",,")


def add_text(parent: ET.Element, tag: str, text: str) -> None:
    ET.SubElement(parent, tag).text = text
