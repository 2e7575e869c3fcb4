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
from vmjobs.hypervisor.base import Machine
from vmjobs.hypervisor.sandbox import Bounds
from vmjobs.model import MIB, HypervisorKind

GIB: Final = 1024 * MIB
#: As many as Linux lets a guest create: one for each 32 pages (``set_max_threads`` in kernel/fork.c).
PROCESSES_OF_A_MIB: Final = 8
#: Added to those: threads of QEMU, processes of the network.
OWN_PROCESSES: Final = 512
#: The maximum of pids.max (``PID_MAX_LIMIT`` in include/linux/threads.h).
MOST_PROCESSES: Final = 4 * 1024 * 1024
#: Bytes of QEMU's cache of translated code, at most (``tb-size``), and of the translation lookaside
#: buffer (TLB) of each of its virtual processors.
TRANSLATED: Final = GIB
FOUND: Final = 512 * MIB
#: Bytes for the network's processes, tables, libraries, and the page cache of the VM's disks, which
#: counts as memory and is reclaimed when the limit is reached.
OWN_MEMORY: Final = 2 * GIB
#: Processors beside the guest's own: for its disks and its network.
OWN_CPUS: Final = 1
#: Bytes of address space that a process reserves and hardly uses: stacks of 64 threads, arenas,
#: libraries.
OWN_ADDRESSES: Final = 4 * GIB
#: Also for disk requests: 1 MiB each, of which each processor may have 256 at each disk.
REQUESTS: Final = 256 * MIB
#: Bytes, added to a tenth, by which a file outgrows the guest's view of it: an overlay's tables.
OWN_FILE: Final = GIB


def bounds_of(machine: Machine, kind: HypervisorKind) -> Bounds:
    """Return the resource limits of a VM.

    Raises:
        HypervisorError: one of its disks is missing.
    """
    memory, cpus = machine.memory * MIB, machine.cpus
    translated = TRANSLATED + cpus * FOUND if kind is HypervisorKind.QEMU else 0
    try:
        live = machine.image.live
        sizes = [machine.image.root.stat().st_size if live is None else live.size]
        sizes += [disk.path.stat().st_size for disk in machine.disks]
    except OSError as error:
        raise HypervisorError(
            f"the disk {error.filename} cannot be used: {reason_of(error)}"
        ) from error
    return Bounds(
        memory=2 * memory + translated + OWN_MEMORY,
        cpus=cpus + OWN_CPUS,
        address=2 * memory + translated + OWN_ADDRESSES + cpus * len(sizes) * REQUESTS,
        file=round(1.1 * max(memory, *sizes)) + OWN_FILE,
        processes=min(machine.memory * PROCESSES_OF_A_MIB + OWN_PROCESSES, MOST_PROCESSES),
    )
