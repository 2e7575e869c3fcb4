"""Has libvirt start QEMU in a sandbox, by :mod:`vmjobs.hypervisor.libvirt.qemu_wrapper`."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import VmConfig
from vmjobs.hypervisor.libvirt.firmware import Firmware
from vmjobs.hypervisor.libvirt.qemu_wrapper import PROGRAM, QEMU_VARIABLE, SETUP_VARIABLE, qemu
from vmjobs.hypervisor.network.namespaces import TUN_DEVICE
from vmjobs.hypervisor.sandbox.bubblewrap import BindMount, ResourceLimits

#: What to do if it is not installed.
HINT: Final = f"copy {PROGRAM}, which is beside vmjobs where that was installed, to /usr/bin"


@dataclass(frozen=True)
class Emulator:
    """The program that libvirt runs as QEMU. env: its extra variables for one VM."""

    path: Path
    env: dict[str, str]


def find(architecture: str = "") -> Path | None:
    """The path of :data:`PROGRAM`: found on the path, or beside this Python.

    architecture: of the VM; ``""``: the node's.
    """
    name = f"{PROGRAM}-{architecture}" if architecture not in {"", platform.machine()} else PROGRAM
    path = f"{os.environ.get('PATH', os.defpath)}:{Path(sys.executable).parent}"
    found = shutil.which(name, path=path)
    return Path(found) if found else None


def emulated(architectures: Iterable[str], *, isolated: bool) -> tuple[str, ...]:
    """Return those that this node emulates now. isolated: its VMs need a sandbox."""
    return tuple(
        name
        for name in architectures
        if name != platform.machine() and shutil.which(qemu(name)) and (find(name) or not isolated)
    )


def build_emulator(
    vm: VmConfig, files: Sequence[BindMount], bounds: ResourceLimits, program: str, *, kvm: bool
) -> Emulator:
    """Return the emulator for a VM that has these files, and nothing else of its node.

    program: QEMU, which it finally runs.

    Raises:
        HypervisorError: the wrapper is not installed.
    """
    found, network = find(vm.image.architecture), vm.network
    if found is None:
        raise HypervisorError(f"cannot isolate VMs here: {PROGRAM} is not installed", hint=HINT)
    devices = ["/dev/urandom", *(["/dev/kvm"] if kvm else []), *([TUN_DEVICE] if network else [])]
    setup = {
        "files": [(str(file.source), file.name, file.read_only) for file in files],
        "devices": devices,
        "bounds": asdict(bounds),
        "namespaces": network.namespace_files if network else [],
    }
    return Emulator(found, {SETUP_VARIABLE: json.dumps(setup), QEMU_VARIABLE: program})


def files(
    vm: VmConfig,
    overlay: Path,
    uefi: Firmware | None,
    nbd: Path | None,
) -> Iterator[BindMount]:
    """Yield the files of a VM, by the names in its domain XML (``domain_xml``)."""
    image = vm.image
    fixed = [image.kernel, image.initrd, None if nbd else image.root, uefi.code if uefi else None]
    own = [overlay, vm.console, nbd, uefi.variables if uefi else None]
    for path in filter(None, fixed):
        yield _bind(path, read_only=True)
    for path in filter(None, own):
        yield _bind(path)
    for disk in vm.disks:
        yield _bind(disk.path, read_only=disk.read_only)


def _bind(path: Path, *, read_only: bool = False) -> BindMount:
    return BindMount(path.absolute(), str(path.absolute()), read_only)
