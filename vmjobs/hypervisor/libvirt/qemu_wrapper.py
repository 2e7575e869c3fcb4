"""Runs QEMU in a sandbox (:mod:`vmjobs.hypervisor.sandbox.bubblewrap`) when libvirt starts it.

libvirt takes :data:`PROGRAM` for QEMU (``<emulator>`` of the domain), and passes the VM's files and
limits in an environment variable (``<qemu:env>``). Without this variable libvirt only asks for QEMU's
capabilities, and gets QEMU itself: the one for the architecture in the program's name, such as
``vmjobs-qemu-aarch64``. bubblewrap passes on the handles that libvirt gives to QEMU: its monitor's and
those of saved VMs. It runs at each start, so it imports little.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.sandbox import bubblewrap
from vmjobs.hypervisor.sandbox.bubblewrap import BindMount, ResourceLimits

#: Name of the installed program.
PROGRAM: Final = "vmjobs-qemu"
#: Environment variables: the VM's files and limits, and the QEMU to run.
SETUP_VARIABLE: Final = "VMJOBS_MACHINE_HAS"
QEMU_VARIABLE: Final = "VMJOBS_QEMU"
#: Paths of QEMU on Red Hat's distributions.
_RED_HAT_PATHS: Final = ("/usr/libexec/qemu-kvm", "/usr/bin/qemu-kvm")
#: glibc reserves 64 MiB of address space per arena, and makes eight arenas per processor of the node.
_ENV: Final = {"MALLOC_ARENA_MAX": "4"}


def qemu(architecture: str = "") -> str:
    """This node's QEMU for VMs of an architecture; empty: its own."""
    here = platform.machine()
    usual = f"qemu-system-{architecture or here}"
    found = shutil.which(usual)
    if found is None and architecture in {"", here}:
        found = next((path for path in _RED_HAT_PATHS if os.access(path, os.X_OK)), None)
    return found or usual


def main() -> NoReturn:
    """Run QEMU, in a sandbox if libvirt starts a VM."""
    architecture = Path(sys.argv[0]).name.removeprefix(PROGRAM).removeprefix("-")
    argv = [os.environ.get(QEMU_VARIABLE) or qemu(architecture), *sys.argv[1:]]
    setup = os.environ.get(SETUP_VARIABLE)
    try:
        if setup is not None:
            argv = _isolated(argv, json.loads(setup))
        os.execvp(argv[0], argv)  # noqa: S606 - no shell
    except (HypervisorError, OSError) as error:
        sys.exit(f"{PROGRAM}: {error}")


def _isolated(argv: Sequence[str], setup: dict[str, Any]) -> list[str]:
    filtered = bubblewrap.open_seccomp_filter()
    os.set_inheritable(filtered, True)
    binds = [BindMount(Path(source), name, read_only) for source, name, read_only in setup["files"]]
    binds += [BindMount(path, str(path), read_only=True) for path in secret_files(argv)]
    return bubblewrap.command(
        argv,
        binds=binds,
        devices=setup["devices"],
        bounds=ResourceLimits(**setup["bounds"]),
        namespaces=setup["namespaces"],
        filtered=filtered,
        env=_ENV,
    )


def secret_files(argv: Sequence[str]) -> Iterator[Path]:
    """Yield libvirt's files that QEMU reads: the key for secrets (there are none)."""
    for option, word in pairwise(argv):
        if option == "-object" and word.startswith("{"):
            about = json.loads(word)
            if about.get("qom-type") == "secret" and "file" in about:
                yield Path(about["file"])
