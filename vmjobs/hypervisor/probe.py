"""Finds out whether a hypervisor really boots a kernel, the same way for all drivers.

A device that opens proves nothing: on some hosts ``/dev/kvm`` opens and creates processors, but a
kernel hangs within its first second. So a probe boots one and waits for its console output.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from vmjobs.errors import VMJobsError
from vmjobs.hypervisor import payload, procs
from vmjobs.hypervisor.base import NAME_PREFIX, BootImage, Hypervisor, ProbeResult, VmConfig
from vmjobs.model import MIB, BootMethod

#: MiB; enough for a distribution's kernel without its modules.
MEMORY = 256

#: Directories and names of distributions' kernels.
_KERNEL_PATTERNS = (
    ("/boot", "vmlinuz-*"),
    ("/boot", "vmlinuz"),
    ("/usr/lib/modules", "*/vmlinuz"),
    ("/", "vmlinuz"),
)


#: Prefix of the names of probes' VMs and folders. The creating process is part of these names.
PROBE_PREFIX: Final = f"{NAME_PREFIX}probe-"
_PROBE_NAME: Final = re.compile(rf"{PROBE_PREFIX}([0-9]{{1,10}})-([0-9]{{1,20}})-.*")


def _own_prefix() -> str:
    return f"{PROBE_PREFIX}{os.getpid()}-{procs.start_ticks(os.getpid())}-"


def is_running(name: str) -> bool:
    """Whether the process of a probe still runs. name: of the probe's VM or folder."""
    found = _PROBE_NAME.fullmatch(name)
    return found is None or procs.start_ticks(int(found[1])) == int(found[2])


def remove_stale_folders(directory: Path) -> None:
    """Remove folders of probes whose process was killed. Their VMs are gone by now."""
    for folder in directory.glob(f"{PROBE_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            found = folder.lstat()
            ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if ours and not is_running(folder.name):
                shutil.rmtree(folder, ignore_errors=True)


def node_kernels() -> list[Path]:
    """Kernels of the node's own distribution, newest name first."""
    found: list[Path] = []
    for directory, pattern in _KERNEL_PATTERNS:
        found += sorted(Path(directory).glob(pattern), reverse=True)
    return found


def first_kernel(kernels: Iterable[Path]) -> Path | None:
    """Return the first one that we may read, and that is not empty."""
    for path in kernels:
        with contextlib.suppress(OSError), path.open("rb") as file:
            if file.read(1):
                return path
    return None


def boot_probe(
    driver: Hypervisor,
    *,
    version: Callable[[], str],
    deadline: float,
    kernel: Path | None = None,
    cmdline: tuple[str, ...] = (),
    where: str = "",
    by_bios: bool = False,
    isolation: str = "",
) -> ProbeResult:
    """Boot a kernel whose first program prints a line and powers off.

    Args:
        version: returns the hypervisor's version; raises HypervisorError if there is none.
        deadline: seconds for the whole probe.
        kernel: to boot, if the hypervisor brings none.
        by_bios: boot a one-sector disk instead.
        cmdline: kernel parameters.
        isolation: a few words about the isolation of its VMs.
        where: the device to name in a failure, e.g. ``/dev/kvm``.
    """
    began = time.monotonic()

    def result(works: bool, detail: str, version_text: str = "") -> ProbeResult:
        return ProbeResult(driver.kind, works, detail, time.monotonic() - began, version_text)

    try:
        version_text = version()
        if not payload.is_supported():
            return result(False, "there is no program to boot for this node's processors", version_text)
        with tempfile.TemporaryDirectory(prefix=_own_prefix()) as scratch:
            make_image = partial(_image, Path(scratch), kernel, by_bios)
            last_words = _boot(driver, Path(scratch), deadline, make_image, cmdline)
    except (VMJobsError, OSError) as error:
        subject = f"{where} opens, but no VM starts on it: " if where else ""
        remedy = f" ({error.hint})" if isinstance(error, VMJobsError) and error.hint else ""
        return result(False, subject + " ".join(str(error).split()) + remedy)
    if last_words is None:
        what = "a boot sector ran" if by_bios else "a kernel booted"
        return result(
            True, f"{what} and powered off{f', {isolation}' if isolation else ''}", version_text
        )
    subject = f"{where} opens, but no kernel boots on it" if where else "no kernel boots"
    heard = f"last heard {last_words!r}" if last_words else "nothing heard"
    found = result(False, f"{subject}: {heard} in {time.monotonic() - began:.0f} s", version_text)
    return replace(found, is_slow=bool(last_words) and found.seconds >= deadline)


def _boot(
    driver: Hypervisor,
    scratch: Path,
    deadline: float,
    make_image: Callable[[str], BootImage],
    cmdline: tuple[str, ...],
) -> str | None:
    """Return None if the guest printed its line, else the last line that it printed."""
    until = time.monotonic() + deadline
    secret = secrets.token_hex(8)
    line = f"vmjobs-probe:{secret}"
    vm = VmConfig(
        name=f"{_own_prefix()}{driver.kind}-{secret[:8]}",
        cpus=1,
        memory=MEMORY,
        image=make_image(line),
        disks=(),
        console=scratch / "console",
        workdir=scratch / "machine",
        cmdline=cmdline,
    )
    try:
        driver.start(vm)
        driver.wait(vm.name, max(0.0, until - time.monotonic()))
    finally:
        driver.destroy(vm.name)
    with contextlib.suppress(FileNotFoundError):
        text = vm.console.read_bytes()
        if line.encode() in text:
            return None
        if last := [words for words in text.decode("utf-8", "replace").split("\n") if words.strip()]:
            return last[-1].strip()[:200]
    return ""


def _image(scratch: Path, kernel: Path | None, by_bios: bool, line: str) -> BootImage:
    (scratch / "machine").mkdir()
    root = scratch / "root"
    with root.open("wb") as file:
        if by_bios:
            file.write(payload.boot_sector(line))
        file.truncate(MIB)
    if by_bios:
        return BootImage(digest="", root=root, boot=BootMethod.BIOS)
    initrd = scratch / "machine" / "initrd"  # UML looks up its relative name here
    initrd.write_bytes(payload.initramfs(line))
    return BootImage(digest="", root=root, kernel=kernel, initrd=initrd)
