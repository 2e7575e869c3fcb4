"""UEFI firmware for VMs: EDK II's OVMF, as distributions package it.

Without Secure Boot: an image's digest decides what boots, not a vendor's key.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vmjobs.errors import HypervisorError, NoHypervisor

#: Code, and the template of the variables that each VM gets a copy of: Debian and Ubuntu; Fedora
#: and RHEL; Arch; openSUSE.
FIRMWARE_PATHS = (
    ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"),
    ("/usr/share/OVMF/OVMF_CODE.fd", "/usr/share/OVMF/OVMF_VARS.fd"),
    ("/usr/share/edk2/ovmf/OVMF_CODE.fd", "/usr/share/edk2/ovmf/OVMF_VARS.fd"),
    ("/usr/share/edk2/x64/OVMF_CODE.4m.fd", "/usr/share/edk2/x64/OVMF_VARS.4m.fd"),
    ("/usr/share/qemu/ovmf-x86_64-code.bin", "/usr/share/qemu/ovmf-x86_64-vars.bin"),
)


@dataclass(frozen=True)
class Firmware:
    """Paths of the firmware's code and of its variables (a template, or a VM's own)."""

    code: Path
    variables: Path


def find(places: Iterable[tuple[str, str]] = FIRMWARE_PATHS) -> Firmware | None:
    """Return the node's UEFI firmware; None if it has none."""
    for code, variables in places:
        if Path(code).is_file() and Path(variables).is_file():
            return Firmware(Path(code), Path(variables))
    return None


def prepare_firmware(workdir: Path, found: Firmware | None, *, resumed: bool = False) -> Firmware:
    """Return firmware for one VM, with its own variables in ``workdir``.

    resumed: the variables are there already.

    Raises:
        NoHypervisor: the node has no firmware.
        HypervisorError: the variables cannot be copied.
    """
    if found is None:
        raise NoHypervisor(
            "the image boots by UEFI, and there is no UEFI firmware on this node",
            hint="apt-get install ovmf",
        )
    own = workdir.absolute() / "uefi-variables.fd"
    try:
        if not resumed:
            shutil.copyfile(found.variables, own)
    except OSError as error:
        raise HypervisorError(f"cannot copy {found.variables} to {own}: {error.strerror}") from error
    return Firmware(found.code, own)
