"""What a machine may take of its node, whoever has it by then: bounds that no sound one exceeds.

================  =========================================  ================================
what              by a delegated cgroup (``limits``)         by rlimits, in its sandbox
================  =========================================  ================================
memory            all of it (``memory.max``)                 each process's address space
processes         threads too (``pids.max``)                 the same (its user namespace's)
disk              --                                         each file, and it has no others
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
#: As many as Linux lets a guest make: one for each 32 pages (``set_max_threads`` in kernel/fork.c).
PROCESSES_OF_A_MIB: Final = 8
#: What comes on top of them: threads of QEMU, processes of the network.
OWN_PROCESSES: Final = 512
#: What pids.max takes at most (``PID_MAX_LIMIT`` in include/linux/threads.h).
MOST_PROCESSES: Final = 4 * 1024 * 1024
#: Bytes that QEMU keeps of code that it has translated, at most (``tb-size``), and of what each of its
#: processors finds where (its TLB).
TRANSLATED: Final = GIB
FOUND: Final = 512 * MIB
#: Bytes for whatever carries the network, for tables, for libraries, and for what the node keeps in
#: memory of a machine's disks: that counts, and is given back when it is too much.
OWN_MEMORY: Final = 2 * GIB
#: Processors for what is not the guest's: its disks, its network.
OWN_CPUS: Final = 1
#: Bytes of address space that a process has of which it uses little: stacks of 64 threads, arenas,
#: libraries.
OWN_ADDRESSES: Final = 4 * GIB
#: The same for each request to a disk, a MiB, of which each processor may have 256 at each disk.
REQUESTS: Final = 256 * MIB
#: Bytes by which a file outgrows what the guest sees of it, beside a tenth: an overlay's tables.
OWN_FILE: Final = GIB


def bounds_of(machine: Machine, kind: HypervisorKind) -> Bounds:
    """The bounds of a machine.

    Raises:
        HypervisorError: its disks are not there.
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
