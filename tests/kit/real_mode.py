"""Disks that run a guest in real mode (``real_mode_guest.S``), where no kernel boots either."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from tests.kit import KIT
from vmjobs.hypervisor.base import BootImage, DataDisk
from vmjobs.model import MIB, BootMethod, HypervisorKind
from vmjobs.subprocess import run

#: What starts a job's input file; a letter follows, which says what the guest does.
MARK = "#!real "
_SECTOR = 512


def real_mode_disk(directory: Path) -> BootImage:
    """A disk that boots by BIOS. After its program it has the tar stream of its outputs."""
    code, program = directory / "guest.o", directory / "guest.bin"
    run(["as", "--32", "-o", code, KIT / "real_mode_guest.S"], timeout=60)
    link = ["ld", "-m", "elf_i386", "-Ttext", "0x7c00", "--oformat", "binary", "-e", "0"]
    run([*link, "-o", program, code], timeout=60)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in (("exit.json", b'{"code": 0}'), ("outputs/answer", bytes(_SECTOR))):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    disk = directory / "disk"
    disk.write_bytes((program.read_bytes() + stream.getvalue()).ljust(MIB, b"\0"))
    kinds = (HypervisorKind.KVM, HypervisorKind.QEMU)
    return BootImage(digest="", root=disk, boot=BootMethod.BIOS, kinds=kinds)


def real_mode_data(directory: Path, do: str) -> tuple[DataDisk, ...]:
    """The disks beside the root disk: the letter ``do`` on the first."""
    disks = []
    for name, content in (("job", f"{MARK}{do}"), ("scratch", ""), ("output", "")):
        disks.append(DataDisk(directory / name, read_only=name == "job"))
        disks[-1].path.write_bytes(content.encode().ljust(MIB, b"\0"))
    return tuple(disks)


def untested(kind: HypervisorKind) -> str:
    """What the tests of a hypervisor leave out where it boots no kernel, for a skip's reason."""
    if kind is not HypervisorKind.KVM:
        return ""
    missing = "kernels, UEFI, networks, saved VMs, several processors, complete consoles"
    return f"; not tested here: {missing} (test_real_mode.py tests the rest)"
