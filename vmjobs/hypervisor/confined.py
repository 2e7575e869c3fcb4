"""What libvirt is told to run in QEMU's place: :mod:`vmjobs.hypervisor.in_place_of_qemu`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import Machine, Network
from vmjobs.hypervisor.firmware import Firmware
from vmjobs.hypervisor.in_place_of_qemu import HAS, PROGRAM, QEMU
from vmjobs.hypervisor.namespaces import TUN_DEVICE
from vmjobs.hypervisor.sandbox import Bind, Bounds

#: What to do where it is missing.
HINT: Final = f"copy {PROGRAM}, which is beside vmjobs where that was installed, to /usr/bin"


@dataclass(frozen=True)
class Emulator:
    """What libvirt runs for QEMU. env: variables that it gets for one machine."""

    path: Path
    env: dict[str, str]


def find() -> Path | None:
    """Where :data:`PROGRAM` is: on the path, or with this Python."""
    path = f"{os.environ.get('PATH', os.defpath)}:{Path(sys.executable).parent}"
    found = shutil.which(PROGRAM, path=path)
    return Path(found) if found else None


def emulator(
    files: Sequence[Bind], bounds: Bounds, qemu: str, *, kvm: bool, network: Network | None
) -> Emulator:
    """What runs a machine that has these files, and nothing else of its node.

    qemu: the program that it is in the end.

    Raises:
        HypervisorError: it is not installed.
    """
    found = find()
    if found is None:
        raise HypervisorError(f"no machine is isolated here: {PROGRAM} is not installed", hint=HINT)
    devices = ["/dev/urandom", *(["/dev/kvm"] if kvm else []), *([TUN_DEVICE] if network else [])]
    has = {
        "files": [(str(file.source), file.name, file.read_only) for file in files],
        "devices": devices,
        "bounds": asdict(bounds),
        "namespaces": network.namespace_files if network else [],
    }
    return Emulator(found, {HAS: json.dumps(has), QEMU: qemu})


def files(
    machine: Machine,
    overlay: Path,
    uefi: Firmware | None,
    nbd: Path | None,
) -> Iterator[Bind]:
    """The files of a machine, by the names that its domain has for them (``domain_xml``)."""
    image = machine.image
    fixed = [image.kernel, image.initrd, None if nbd else image.root, uefi.code if uefi else None]
    own = [overlay, machine.console, nbd, uefi.variables if uefi else None]
    for path in filter(None, fixed):
        yield _bind(path, read_only=True)
    for path in filter(None, own):
        yield _bind(path)
    for disk in machine.disks:
        yield _bind(disk.path, read_only=disk.read_only)


def _bind(path: Path, *, read_only: bool = False) -> Bind:
    return Bind(path.absolute(), str(path.absolute()), read_only)
