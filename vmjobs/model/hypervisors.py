"""Hypervisors, what their VMs support, and what a guest can reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class BootMethod(StrEnum):
    """How a VM boots: a kernel stored beside the disk, or a boot loader on the disk."""

    KERNEL = "kernel"
    BIOS = "bios"
    UEFI = "uefi"


class HypervisorKind(StrEnum):
    """The hypervisor of a VM, best first for the node's own architecture."""

    KVM = "kvm"
    XEN = "xen"
    UML = "uml"
    QEMU = "qemu"


class NetworkMode(StrEnum):
    """What a guest can reach: nothing, its guest endpoint, or also the internet."""

    NONE = "none"
    REPOSITORY = "repository"
    OUTBOUND = "outbound"


@dataclass(frozen=True)
class Capabilities:
    """What the VMs of a hypervisor support; docs/hypervisors.md shows it as a table.

    boots: how they boot. boots_image_kernel: they boot the image's own kernel, not the hypervisor's.
    cloud_init: their kernel reads the disk of NoCloud data. can_save: they can be saved, and resumed
    on another node. lazy_start: they start before their image is complete. private_networks: they
    can have a card on one. limits_disks: the hypervisor limits its VMs' disks; else a cgroup does.
    emulated: their processors are emulated. architectures: other than the node's that they can have,
    as ``uname -m`` calls them. cpus: maximum number of processors. shared_cpus: the same
    for VMs with several users, as cluster VMs have.
    """

    boots: tuple[BootMethod, ...] = tuple(BootMethod)
    boots_image_kernel: bool = True
    cloud_init: bool = True
    can_save: bool = True
    lazy_start: bool = True
    private_networks: bool = False
    limits_disks: bool = True
    emulated: bool = False
    architectures: tuple[str, ...] = ()
    cpus: int = 256
    shared_cpus: int = 256


#: The architecture of all nodes, as ``uname -m`` calls it.
NODE_ARCHITECTURE: Final = "x86_64"
#: Architectures that an emulator may have on a node of another one.
EMULATED_ARCHITECTURES: Final = ("aarch64", "s390x")
#: A UML VM boots UML's own kernel, and has several processors only if it need not isolate its users
#: from each other (``kernel_boot.system_call_parameters``). A UML kernel may support less.
CAPABILITIES: Final[Mapping[HypervisorKind, Capabilities]] = {
    HypervisorKind.KVM: Capabilities(),
    HypervisorKind.XEN: Capabilities(
        boots=(BootMethod.KERNEL, BootMethod.BIOS),
        lazy_start=False,
        limits_disks=False,
        cpus=128,
        shared_cpus=128,
    ),
    HypervisorKind.UML: Capabilities(
        boots=(BootMethod.KERNEL,),
        boots_image_kernel=False,
        can_save=False,
        lazy_start=False,
        private_networks=True,
        limits_disks=False,
        cpus=64,
        shared_cpus=1,
    ),
    HypervisorKind.QEMU: Capabilities(emulated=True, architectures=EMULATED_ARCHITECTURES),
}
#: Hypervisors whose VMs can be saved, and resumed on another node.
CHECKPOINTABLE_KINDS: Final = tuple(kind for kind, can in CAPABILITIES.items() if can.can_save)


def check_checkpoint(kind: HypervisorKind | None) -> str:
    """Why a job that demands this hypervisor cannot be checkpointed, or ``""``."""
    if kind in {None, *CHECKPOINTABLE_KINDS}:
        return ""
    *others, last = CHECKPOINTABLE_KINDS
    return f"checkpoint is for {', '.join(others)} and {last}: {kind} VMs cannot be saved"


def cpu_limit(kind: HypervisorKind, *, shared: bool = False) -> int:
    """Maximum number of processors of a VM. shared: several users share it."""
    return CAPABILITIES[kind].shared_cpus if shared else CAPABILITIES[kind].cpus


def kinds_with_cpus(cpus: int, *, shared: bool = False) -> tuple[HypervisorKind, ...]:
    """The hypervisors whose VMs can have so many processors, best first."""
    return tuple(kind for kind in HypervisorKind if cpu_limit(kind, shared=shared) >= cpus)


def check_cpus(kind: HypervisorKind | None, cpus: int, *, shared: bool = False) -> str:
    """Why a VM of the requested hypervisor cannot have so many processors, or ``""``."""
    if kind is None or (most := cpu_limit(kind, shared=shared)) >= cpus:
        return ""
    able = " or ".join(kinds_with_cpus(cpus, shared=shared)) or "none"
    return (
        f"a {kind} VM has at most {most} processor{'s' * (most > 1)}, but {cpus} are requested: "
        f"request fewer, or another hypervisor ({able})"
    )


def check_image_cpus(cpus: int, kinds: Sequence[HypervisorKind], *, shared: bool = False) -> str:
    """Why no hypervisor for an image supports so many processors, or ``""``."""
    most = max(cpu_limit(kind, shared=shared) for kind in kinds)
    if most >= cpus:
        return ""
    return (
        f"only {' or '.join(kinds)} boots the image, with at most {most} processor{'s' * (most > 1)}, "
        f"but {cpus} are requested"
    )
