"""Limits that contain a VM whose guest broke out; a sound VM never reaches them.

================  =========================================  ================================
what              by a delegated cgroup                      by rlimits, in its sandbox
================  =========================================  ================================
memory            all of it (``memory.max``)                 each process's address space
processes         threads too (``pids.max``)                 the same (its user namespace's)
disk              --                                         each file; it can write no others
processor time    all of it (``cpu.max``)                    --
================  =========================================  ================================
"""

from __future__ import annotations

from typing import Final

from vmjobs.errors import HypervisorError, reason_of
from vmjobs.hypervisor.base import VmConfig
from vmjobs.hypervisor.sandbox.bubblewrap import ResourceLimits
from vmjobs.model import CAPABILITIES, MIB, HypervisorKind

GIB: Final = 1024 * MIB
#: As many as Linux lets a guest create: one for each 32 pages (``set_max_threads`` in kernel/fork.c).
PROCESSES_PER_MIB: Final = 8
#: Added to those: threads of QEMU, processes of the network.
EXTRA_PROCESSES: Final = 512
#: The maximum of pids.max (``PID_MAX_LIMIT`` in include/linux/threads.h).
MAX_PROCESSES: Final = 4 * 1024 * 1024
#: Bytes of QEMU's cache of translated code, at most (``tb-size``), and of the translation lookaside
#: buffer (TLB) of each of its virtual processors.
TRANSLATION_CACHE_BYTES: Final = GIB
TLB_BYTES: Final = 512 * MIB
#: Bytes for the network's processes, tables, libraries, and the page cache of the VM's disks, which
#: counts as memory and is reclaimed when the limit is reached.
EXTRA_MEMORY_BYTES: Final = 2 * GIB
#: Processors beside the guest's own: for its disks and its network.
EXTRA_CPUS: Final = 1
#: Bytes of address space that a process reserves and hardly uses: stacks of 64 threads, arenas,
#: libraries.
EXTRA_ADDRESS_BYTES: Final = 4 * GIB
#: Also for disk requests: 1 MiB each, of which each processor may have 256 at each disk.
DISK_REQUEST_BYTES: Final = 256 * MIB
#: Bytes, added to a tenth, by which a file outgrows the guest's view of it: an overlay's tables.
EXTRA_FILE_BYTES: Final = GIB


def resource_limits_for(vm: VmConfig, kind: HypervisorKind) -> ResourceLimits:
    """Return the resource limits of a VM.

    Raises:
        HypervisorError: one of its disks is missing.
    """
    memory, cpus = vm.memory * MIB, vm.cpus
    translated = TRANSLATION_CACHE_BYTES + cpus * TLB_BYTES if CAPABILITIES[kind].emulated else 0
    try:
        live = vm.image.live
        sizes = [vm.image.root.stat().st_size if live is None else live.size]
        sizes += [disk.path.stat().st_size for disk in vm.disks]
    except OSError as error:
        raise HypervisorError(
            f"the disk {error.filename} cannot be used: {reason_of(error)}"
        ) from error
    return ResourceLimits(
        memory=2 * memory + translated + EXTRA_MEMORY_BYTES,
        cpus=cpus + EXTRA_CPUS,
        address=2 * memory + translated + EXTRA_ADDRESS_BYTES + cpus * len(sizes) * DISK_REQUEST_BYTES,
        file=round(1.1 * max(memory, *sizes)) + EXTRA_FILE_BYTES,
        processes=min(vm.memory * PROCESSES_PER_MIB + EXTRA_PROCESSES, MAX_PROCESSES),
    )
