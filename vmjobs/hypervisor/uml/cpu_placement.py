"""Keeps each VM that has one processor on one CPU of the node.

A system call of a guest's program passes from one process of its VM to another and back, and only one
of them runs at a time. Linux wakes the other one on an idle CPU if there is any: a call then took 95
microseconds, and 13 with both on one CPU (two CPUs of an EPYC in a VM, Linux 6.18). Only CPU affinity
prevents that.

The affinity of a VM's processes is the record of its CPU, also for an agent that was restarted.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from logging import getLogger
from pathlib import Path

from vmjobs.hypervisor import procs

log = getLogger(__name__)

#: Seconds for which idle times of CPUs, and waiting times of a VM, are averaged at least.
SAMPLE_SECONDS, LOOK_SECONDS = 1.0, 5.0
#: A VM that waits for its CPU for a larger share of the time moves to a CPU that is idle for a share
#: that is larger than its own CPU's by more than this.
WAITING_SHARE, IDLE_GAP = 0.2, 0.5
#: Passes over a VM's processes while it starts new ones.
MAX_PASSES = 5


class CpuPlacement:
    """Chooses the CPUs of VMs and applies that. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cpus: dict[str, int] = {}
        self._looks: dict[str, tuple[float, float]] = {}
        self._idle: dict[int, float] = {}
        self._recent: Counter[int] = Counter()
        self._sampled_at, self._times = time.monotonic(), _cpu_times()

    def place(self, name: str, pid: int) -> None:
        """Keep a VM that has just started on one CPU. pid: its first process."""
        allowed = os.sched_getaffinity(0)
        with self._lock:
            self._sample()
            cpu = choose(allowed, self._idle, self._recent, Counter(self._cpus.values()))
            self._keep_on(name, pid, cpu)
            self._looks[name] = time.monotonic(), 0.0

    def rebalance(self, name: str, pid: int) -> None:
        """Move a VM to a better CPU if it has to wait for its own. Call it from time to time."""
        now = time.monotonic()
        with self._lock:
            before = self._looks.get(name)
            if before is not None and now - before[0] < LOOK_SECONDS:
                return
            allowed, own = os.sched_getaffinity(0), _affinity(pid)
            if len(own) != 1 or own == allowed:  # it has several processors, or there is no choice
                return
            (cpu,) = own
            waited = _waited_seconds(pid)
            self._looks[name], self._cpus[name] = (now, waited), cpu
            self._sample()
            if before is None or waited - before[1] < WAITING_SHARE * (now - before[0]):
                return
            vms = Counter(self._cpus.values())
            better = find_better(cpu, allowed, self._idle, self._recent, vms)
            if better is not None:
                log.debug("%s moves from CPU %d to CPU %d", name, cpu, better)
                self._keep_on(name, pid, better)

    def forget(self, name: str) -> None:
        """Remove the entries of a VM that is gone."""
        with self._lock:
            self._cpus.pop(name, None)
            self._looks.pop(name, None)

    def _keep_on(self, name: str, pid: int, cpu: int) -> None:
        self._cpus[name] = cpu
        self._recent[cpu] += 1
        for _ in range(MAX_PASSES):  # new processes inherit the affinity of those that start them
            if sum(_keep_task_on(task, cpu) for task in _tasks(pid)) == 0:
                return

    def _sample(self) -> None:
        now = time.monotonic()
        if now - self._sampled_at >= SAMPLE_SECONDS:
            times = _cpu_times()
            self._idle = idle_shares(self._times, times)
            self._sampled_at, self._times = now, times
            self._recent.clear()


def choose(
    allowed: set[int], idle: Mapping[int, float], recent: Mapping[int, int], vms: Mapping[int, int]
) -> int:
    """Return the CPU for a new VM: with the least load, then with the fewest VMs.

    idle: shares of the time. recent: VMs that were placed since then. vms: all VMs. All by CPU.
    """
    return min(
        allowed,
        key=lambda cpu: (
            round(1 - idle.get(cpu, 1.0) + recent.get(cpu, 0), 1),
            vms.get(cpu, 0),
            cpu,
        ),
    )


def find_better(
    cpu: int,
    allowed: set[int],
    idle: Mapping[int, float],
    recent: Mapping[int, int],
    vms: Mapping[int, int],
) -> int | None:
    """Return a better CPU for a VM that has to wait for ``cpu``; None: there is none.

    idle, recent, vms: see :func:`choose`.
    """
    candidates = {other for other in allowed if not recent.get(other)} - {cpu}
    if not candidates:
        return None
    best = choose(candidates, idle, {}, vms)
    is_idle = idle.get(best, 0.0) - idle.get(cpu, 0.0) > IDLE_GAP
    return best if is_idle or vms.get(cpu, 0) - vms.get(best, 0) >= 2 else None


def idle_shares(
    before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]]
) -> dict[int, float]:
    """Return the share of the time in which each CPU was idle. before, after: idle and total time."""
    return {
        cpu: (idle - before[cpu][0]) / max(1, total - before[cpu][1])
        for cpu, (idle, total) in after.items()
        if cpu in before
    }


def _cpu_times() -> dict[int, tuple[int, int]]:
    """Idle and total ticks of each CPU (proc(5), ``/proc/stat``); empty if they cannot be read."""
    found = {}
    with suppress(OSError), Path("/proc/stat").open(encoding="ascii") as file:
        for line in file:
            name, *fields = line.split()
            if not name.startswith("cpu"):
                break
            if name != "cpu":
                # The last two fields, of guests, are included in others.
                times = [int(field) for field in fields[:8]]
                found[int(name[3:])] = times[3] + times[4], sum(times)
    return found


def _tasks(pid: int) -> Iterator[int]:
    """Yield the threads of a process and of its descendants."""
    left = [pid]
    while left:
        process = left.pop()
        yield from procs.threads(process)
        left += procs.children(process)


def _affinity(task: int) -> set[int]:
    try:
        return os.sched_getaffinity(task)
    except OSError:  # it has ended
        return set()


def _keep_task_on(task: int, cpu: int) -> bool:
    """Whether it was not on this CPU, and now is."""
    if _affinity(task) in (set(), {cpu}):
        return False
    try:
        os.sched_setaffinity(task, {cpu})
    except ProcessLookupError:
        return False
    except OSError as error:  # slower, but not wrong
        log.debug("cannot keep task %d on CPU %d: %s", task, cpu, error.strerror)
        return False
    return True


def _waited_seconds(pid: int) -> float:
    """Seconds for which the living tasks of a process tree could run and had to wait.

    From Linux' ``Documentation/scheduler/sched-stats.rst``, the second field of ``schedstat``.
    """
    waited = 0
    for task in _tasks(pid):
        with suppress(OSError, IndexError), Path(f"/proc/{task}/schedstat").open("rb") as file:
            waited += int(file.read().split()[1])
    return waited / 1e9
