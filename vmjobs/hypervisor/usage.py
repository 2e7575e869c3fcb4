"""Resource usage of processes on their node, and the peak seen of each VM's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import VmUsage

_TICKS = os.sysconf("SC_CLK_TCK")

_Processes = list[procs.Process]


def process_tree_usage(pid: int) -> VmUsage:
    """Return the usage of a process, its descendants, and their reaped children.

    Parents are read before their children: one that is reaped in between is missed until the next call,
    and never counted twice.
    """
    cpu, memory, left = 0.0, 0, [pid]
    while left:
        one = left.pop()
        cpu, memory = cpu + _processor_seconds(one), max(memory, _peak_memory(one))
        left += procs.children(one)
    return VmUsage(cpu, memory)


class UsageMeter:
    """The highest usage seen of VMs. Safe to use from several threads.

    helpers: finds a VM's helper processes; they start before it runs, and may end first.
    """

    def __init__(self, helpers: Callable[[str], _Processes]) -> None:
        self._find = helpers
        self._helpers: dict[str, _Processes] = {}
        #: By process number; 0 is the VM itself.
        self._seen: dict[str, dict[int, VmUsage]] = {}
        self._lock = threading.Lock()

    def look(self, name: str, vm: VmUsage) -> VmUsage:
        """Return the usage of a VM and its helpers. vm: the VM's present usage."""
        with self._lock:
            if vm == VmUsage() and name not in self._seen:
                return vm  # no such VM: an entry would never be removed
            if name not in self._helpers:  # this scans all processes
                self._helpers[name] = self._find(name)
            seen = self._seen.setdefault(name, {})
            _keep_maximum(seen, 0, vm)
            for helper in self._helpers[name]:
                if _is_same_process(helper):
                    _keep_maximum(seen, helper.pid, VmUsage(process_tree_usage(helper.pid).cpu_seconds))
            return VmUsage(sum(used.cpu_seconds for used in seen.values()), seen[0].memory)

    def forget(self, name: str) -> None:
        """Remove the entry of a VM that is gone: its name may be used again."""
        with self._lock:
            self._helpers.pop(name, None)
            self._seen.pop(name, None)


def _is_same_process(process: procs.Process) -> bool:
    """Whether the process is still the same; ``stopped`` may differ."""
    found = procs.read(process.pid)
    return found is not None and found.argv == process.argv


def _keep_maximum(seen: dict[int, VmUsage], which: int, used: VmUsage) -> None:
    before = seen.get(which, VmUsage())
    cpu = max(before.cpu_seconds, used.cpu_seconds)
    seen[which] = VmUsage(cpu, max(before.memory, used.memory))


def _processor_seconds(pid: int) -> float:
    """Of a process and of its reaped children (proc(5): utime to cstime)."""
    with suppress(OSError):  # it has ended
        return sum(map(int, procs.stat_fields(pid)[11:15])) / _TICKS
    return 0.0


def _peak_memory(pid: int) -> int:
    """Peak resident memory of a process, in bytes."""
    with suppress(OSError):
        return int(procs.status_fields(pid).get("VmHWM", "0").split()[0]) * 1024
    return 0
