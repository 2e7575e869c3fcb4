"""QEMU in a sandbox of its own (:mod:`vmjobs.hypervisor.sandbox`), though libvirt starts it.

libvirt is told that :data:`PROGRAM` is QEMU (``<emulator>`` of the domain), and what the machine has,
by a variable of its environment (``<qemu:env>``). Without it libvirt only asks what QEMU can do: it
gets QEMU itself. Handles that libvirt gives to QEMU, its monitor's and those of saved machines, go
through bubblewrap as they are. It runs at each start: little is imported.
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
from vmjobs.hypervisor import sandbox
from vmjobs.hypervisor.sandbox import Bind, Bounds

#: What this is called where it is installed.
PROGRAM: Final = "vmjobs-qemu"
#: Variables: what the machine has, and which QEMU is to run it.
HAS: Final = "VMJOBS_MACHINE_HAS"
QEMU: Final = "VMJOBS_QEMU"
#: Where Red Hat's distributions have it.
_ELSEWHERE: Final = ("/usr/libexec/qemu-kvm", "/usr/bin/qemu-kvm")
#: Each arena of glibc's is 64 MiB of address space, and it makes eight for each processor of the node.
_ENV: Final = {"MALLOC_ARENA_MAX": "4"}


def qemu() -> str:
    """This node's QEMU for machines of its own architecture."""
    usual = f"qemu-system-{platform.machine()}"
    return shutil.which(usual) or next((p for p in _ELSEWHERE if os.access(p, os.X_OK)), usual)


def main() -> NoReturn:
    """Be QEMU, for libvirt."""
    argv = [os.environ.get(QEMU) or qemu(), *sys.argv[1:]]
    has = os.environ.get(HAS)
    try:
        if has is not None:
            argv = _isolated(argv, json.loads(has))
        os.execvp(argv[0], argv)  # noqa: S606 - no shell
    except (HypervisorError, OSError) as error:
        sys.exit(f"{PROGRAM}: {error}")


def _isolated(argv: Sequence[str], has: dict[str, Any]) -> list[str]:
    filtered = sandbox.filter_file()
    os.set_inheritable(filtered, True)
    binds = [Bind(Path(source), name, read_only) for source, name, read_only in has["files"]]
    binds += [Bind(path, str(path), read_only=True) for path in secrets_of(argv)]
    return sandbox.command(
        argv,
        binds=binds,
        devices=has["devices"],
        bounds=Bounds(**has["bounds"]),
        namespaces=has["namespaces"],
        filtered=filtered,
        env=_ENV,
    )


def secrets_of(argv: Sequence[str]) -> Iterator[Path]:
    """Files of libvirt's own that QEMU reads: the key with which it gets secrets (there are none)."""
    for option, word in pairwise(argv):
        if option == "-object" and word.startswith("{"):
            about = json.loads(word)
            if about.get("qom-type") == "secret" and "file" in about:
                yield Path(about["file"])
