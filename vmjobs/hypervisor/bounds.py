"""What a machine may take of its node, whoever has it by then: bounds that no sound one meets.

================  =========================================  ================================
what              by a delegated cgroup (``limits``)         by rlimits, in its sandbox
================  =========================================  ================================
memory            all of it (``memory.max``)                 each process's address space
processes         threads too (``pids.max``)                 the same (its user namespace's)
disk              --                                         each file, and it has no others
processor time    ``cpu.max``, ``cpu.weight``, where asked   --
================  =========================================  ================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import Machine
from vmjobs.model import MIB, HypervisorKind

GIB: Final = 1024 * MIB
#: As many as Linux lets a guest make: one for each 32 pages (``set_max_threads`` in kernel/fork.c).
PROCESSES_OF_A_MIB: Final = 8
#: What comes on top of them: threads of QEMU, processes of the network.
OWN_PROCESSES: Final = 512
#: Bytes that QEMU keeps of code that it has translated, at most (``tb-size``).
TRANSLATED: Final = GIB
#: Bytes for whatever carries the network, for tables of pages, for libraries.
OWN_MEMORY: Final = 512 * MIB
#: Bytes of address space that a process has of which it uses little: stacks, arenas, libraries.
OWN_ADDRESSES: Final = 4 * GIB
#: Bytes by which a file outgrows what the guest sees of it, beside a tenth: an overlay's tables.
OWN_FILE: Final = GIB


@dataclass(frozen=True)
class Bounds:
    """memory, address, file: bytes. processes: threads too."""

    memory: int
    address: int
    file: int
    processes: int


def bounds_of(machine: Machine, kind: HypervisorKind) -> Bounds:
    """The bounds of a machine.

    Raises:
        HypervisorError: its disks are not there.
    """
    memory = machine.memory * MIB
    translated = TRANSLATED if kind is HypervisorKind.QEMU else 0
    try:
        live = machine.image.live
        sizes = [machine.image.root.stat().st_size if live is None else live.size]
        sizes += [disk.path.stat().st_size for disk in machine.disks]
    except OSError as error:
        raise HypervisorError(f"a disk is not there: {error}") from error
    return Bounds(
        memory=memory + memory // 4 + translated + OWN_MEMORY,
        address=2 * memory + OWN_ADDRESSES,
        file=round(1.1 * max(memory, *sizes)) + OWN_FILE,
        processes=machine.memory * PROCESSES_OF_A_MIB + OWN_PROCESSES,
    )
