"""Processor time and memory of idle VMs on a node: the agent's, and the VMs' own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.clusters import IMAGE, cluster, fresh, operator
from bench.figures import Finding, spread
from tests.kit.grid import Grid, wait_for
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.procs import Process
from vmjobs.hypervisor.sandbox import helper_processes

VMS = 32
#: For each VM, in MiB: as much as a node of the grid has room for.
MEMORY, DISK = 128, 64
#: Memory that the hypervisor needs in addition, in MiB: UML's own kernel.
KERNEL = 48.0
NODE = "node1"
UP_SECONDS = 1800.0
#: VMs are still busy for a while after they come up.
SETTLE_SECONDS = 30.0
#: The program that starts VMs for the agent.
STARTER = "/vmjobs/hypervisor/sandbox/launcher.py"
_TICK = os.sysconf("SC_CLK_TCK")
#: Limits for the agent with all VMs: seconds per minute, and MiB more than it has without VMs.
CPU_TARGET, MEMORY_TARGET = 3.0, 64.0


@dataclass(frozen=True)
class Cost:
    """Processor seconds of some processes since they started, and their memory in MiB.

    memory: private memory, and the processes' share of shared memory.
    """

    cpu: dict[int, float]
    memory: float

    def seconds_since(self, before: Cost) -> float:
        """Processor seconds since ``before``; all those of processes that started in between."""
        return sum(seconds - before.cpu.get(pid, 0.0) for pid, seconds in self.cpu.items())


def cluster_idle(grid: Grid, minutes: int) -> Iterator[Finding]:
    """Measure a node without VMs, with them, and without them again."""
    with operator(grid) as api:
        before = _minutes(grid, minutes)
        spec = ClusterSpec(
            name=fresh("i"),
            image=IMAGE,
            size=VMS,
            memory=MEMORY,
            disk=DISK,
            nodes=(f"{NODE}.*",),
            boot_seconds=1800,
            join_seconds=1800,
        )
        with cluster(api, spec):
            wait_for(
                lambda: api.clusters.get(spec.name).up == VMS or None,
                f"{VMS} VMs to be UP",
                UP_SECONDS,
            )
            time.sleep(SETTLE_SECONDS)
            with_them = _minutes(grid, minutes)
        time.sleep(SETTLE_SECONDS)
        after = _minutes(grid, minutes)
    none = {who: [*before[who], *after[who]] for who in before}
    for who, kind, target in (
        ("agent", "CPU", CPU_TARGET),
        ("network helpers", "CPU", CPU_TARGET),
        ("VMs", "CPU", 60.0),
        ("agent", "memory", MEMORY_TARGET),
        ("network helpers", "memory", VMS * 16.0),
        ("VMs", "memory", VMS * (MEMORY + KERNEL)),
    ):
        yield _finding(who, kind, with_them, none, target)


_Minutes = dict[str, list[tuple[float, float]]]


def _finding(who: str, kind: str, those: _Minutes, none: _Minutes, target: float) -> Finding:
    column = 0 if kind == "CPU" else 1
    ours = [minute[column] for minute in those[who]]
    theirs = [minute[column] for minute in none[who]]
    more = spread(ours).median - spread(theirs).median
    return Finding(
        0,
        f"{kind} of the {who}, {VMS} idle VMs",
        ours,
        theirs,
        f"more than for none, {'s a minute' if column == 0 else 'MiB'}",
        more,
        None,
        target,
        details={"for each VM": more / VMS, "load average": os.getloadavg()},
        unit="s" if column == 0 else "MiB",
    )


def _minutes(grid: Grid, count: int) -> _Minutes:
    """For each kind of process: seconds used in each minute, and MiB at its end."""
    found: _Minutes = {}
    for _ in range(count):
        before, began = _costs(grid), time.monotonic()
        time.sleep(60)
        after, took = _costs(grid), time.monotonic() - began
        for who, cost in after.items():
            seconds = cost.seconds_since(before[who]) * 60 / took
            found.setdefault(who, []).append((seconds, cost.memory))
    return found


def _costs(grid: Grid) -> dict[str, Cost]:
    groups: dict[str, list[int]] = {"agent": [], "network helpers": [], "VMs": []}
    for process in _inside(grid.container(NODE)):
        if helper_processes.vm_of(process):
            groups["network helpers"].append(process.pid)
        elif any(word.startswith("umid=") for word in process.argv):
            groups["VMs"].append(process.pid)
        elif process.argv[-1:] == ("agent",) or any(word.endswith(STARTER) for word in process.argv):
            groups["agent"].append(process.pid)
    return {who: _cost(pids) for who, pids in groups.items()}


def _inside(container: str) -> Iterator[Process]:
    """Yield the processes of a container, as its host sees them."""
    for entry in os.scandir("/proc"):
        with suppress(OSError):
            if (
                entry.name.isdigit()
                and container in (Path(entry.path) / "cgroup").read_text("ascii", "replace")
                and (process := procs.read(int(entry.name)))
            ):
                yield process


def _cost(pids: list[int]) -> Cost:
    cpu, memory = {}, 0.0
    for pid in pids:
        with suppress(OSError):  # the process has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            cpu[pid] = (int(fields[11]) + int(fields[12])) / _TICK
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            memory += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    return Cost(cpu, memory)
