"""UEFI firmware for machines that boot by it: EDK II's OVMF, as distributions ship it.

Without Secure Boot: what an image boots is decided by its digest, not by somebody's key.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vmjobs.errors import HypervisorError, NoHypervisor

#: Code, and the variables that each machine gets a copy of: Debian and Ubuntu; Fedora and RHEL;
#: Arch; openSUSE.
PLACES = (
    ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"),
    ("/usr/share/OVMF/OVMF_CODE.fd", "/usr/share/OVMF/OVMF_VARS.fd"),
    ("/usr/share/edk2/ovmf/OVMF_CODE.fd", "/usr/share/edk2/ovmf/OVMF_VARS.fd"),
    ("/usr/share/edk2/x64/OVMF_CODE.4m.fd", "/usr/share/edk2/x64/OVMF_VARS.4m.fd"),
    ("/usr/share/qemu/ovmf-x86_64-code.bin", "/usr/share/qemu/ovmf-x86_64-vars.bin"),
)


@dataclass(frozen=True)
class Firmware:
    """Where the firmware's code is, and its variables (a template, or one machine's own)."""

    code: Path
    variables: Path


def find(places: Iterable[tuple[str, str]] = PLACES) -> Firmware | None:
    """The node's UEFI firmware, if it has one."""
    for code, variables in places:
        if Path(code).is_file() and Path(variables).is_file():
            return Firmware(Path(code), Path(variables))
    return None


def lay_out(workdir: Path, found: Firmware | None, *, resumed: bool = False) -> Firmware:
    """Firmware for one machine, with variables of its own in ``workdir``. resumed: it has left some.

    Raises:
        NoHypervisor: the node has no firmware.
        HypervisorError: the copy cannot be made.
    """
    if found is None:
        raise NoHypervisor(
            "the image boots by UEFI, and there is no UEFI firmware on this node",
            hint="apt-get install ovmf",
        )
    own = workdir.absolute() / "uefi-variables.fd"
    if resumed:
        return Firmware(found.code, own)
    try:
        shutil.copyfile(found.variables, own)
    except OSError as error:
        raise HypervisorError(f"cannot copy {found.variables} to {own}: {error.strerror}") from error
    return Firmware(found.code, own)
