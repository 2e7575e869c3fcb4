"""QEMU in a sandbox of its own (:mod:`vmjobs.hypervisor.sandbox`), though libvirt starts it.

libvirt is told that :data:`PROGRAM` is QEMU (``<emulator>`` of the domain), and which files the
machine has, by a variable of its environment (``<qemu:env>``). Without it libvirt only asks what QEMU
can do: it gets QEMU itself. Handles that libvirt gives to QEMU, its monitor's and those of saved
machines, go through bubblewrap as they are.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import sandbox
from vmjobs.hypervisor.base import Machine
from vmjobs.hypervisor.bounds import Bounds
from vmjobs.hypervisor.firmware import Firmware
from vmjobs.hypervisor.sandbox import Bind

#: What stands in QEMU's place.
PROGRAM: Final = "vmjobs-qemu"
#: By which variables it is told what the machine has, and which QEMU is to run it.
HAS: Final = "VMJOBS_MACHINE_HAS"
QEMU: Final = "VMJOBS_QEMU"
DEFAULT: Final = "qemu-system-x86_64"
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


def emulator(files: Sequence[Bind], bounds: Bounds, qemu: str, *, kvm: bool) -> Emulator:
    """What runs a machine that has these files, and nothing else of its node.

    qemu: the program that it is in the end.

    Raises:
        HypervisorError: it is not installed.
    """
    found = find()
    if found is None:
        raise HypervisorError(f"no machine is isolated here: {PROGRAM} is not installed", hint=HINT)
    devices = ["/dev/urandom", *(["/dev/kvm"] if kvm else [])]
    said = {
        "files": [(str(file.source), file.name, file.read_only) for file in files],
        "devices": devices,
        "bounds": asdict(bounds),
    }
    return Emulator(found, {HAS: json.dumps(said), QEMU: qemu})


def files(
    machine: Machine,
    overlay: Path,
    cable: Path | None,
    uefi: Firmware | None,
    nbd: Path | None,
) -> Iterator[Bind]:
    """The files of a machine, by the names that its domain has for them (``domain_xml``)."""
    image = machine.image
    fixed = [image.kernel, image.initrd, None if nbd else image.root, uefi.code if uefi else None]
    own = [overlay, machine.console, cable, nbd, uefi.variables if uefi else None]
    for path in filter(None, fixed):
        yield _bind(path, read_only=True)
    for path in filter(None, own):
        yield _bind(path)
    for disk in machine.disks:
        yield _bind(disk.path, read_only=disk.read_only)


def _bind(path: Path, *, read_only: bool = False) -> Bind:
    return Bind(path.absolute(), str(path.absolute()), read_only)


def main() -> NoReturn:
    """Be QEMU, for libvirt."""
    argv = [os.environ.get(QEMU, DEFAULT), *sys.argv[1:]]
    told = os.environ.get(HAS)
    try:
        if told is not None:
            argv = _isolated(argv, json.loads(told))
        os.execvp(argv[0], argv)  # noqa: S606 - no shell
    except (HypervisorError, OSError) as error:
        sys.exit(f"{PROGRAM}: {error}")


def _isolated(argv: Sequence[str], has: dict[str, Any]) -> list[str]:
    filtered = sandbox.filter_file()
    os.set_inheritable(filtered, True)
    binds = [Bind(Path(source), name, read_only) for source, name, read_only in has["files"]]
    binds += [_bind(path, read_only=True) for path in _secrets(argv)]
    bounds = Bounds(**has["bounds"])
    return sandbox.command(
        argv, binds=binds, devices=has["devices"], bounds=bounds, filtered=filtered, env={}
    )


def _secrets(argv: Sequence[str]) -> Iterator[Path]:
    """Files of libvirt's own that QEMU reads: the key with which it gets secrets (there are none)."""
    for word in argv:
        if word.startswith("{"):
            about = json.loads(word)
            if about.get("qom-type") == "secret" and "file" in about:
                yield Path(about["file"])
