"""Enforces VMs' limits on this node: by a delegated cgroup, or else by other means.

================  ==========================  ======================================================
limit             with a delegated cgroup     without
================  ==========================  ======================================================
cpu_percent       cpu.max                     a process that stops it at times (``cpu_throttle``)
cpu_weight        cpu.weight                  nice levels, as far as permitted
disk_bytes (UML)  io.max, each way            not at all
disk_bytes        libvirt's iotune, read and written together
network_bits      the VM's network namespace, each way (``guest_network``)
================  ==========================  ======================================================
"""

from __future__ import annotations

import errno
import math
import os
import resource
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import VmConfig, VmLimits
from vmjobs.hypervisor.sandbox import cgroup
from vmjobs.hypervisor.sandbox.bubblewrap import ResourceLimits
from vmjobs.hypervisor.sandbox.resource_limits import resource_limits_for
from vmjobs.model import CAPABILITIES, HypervisorKind

#: Default cpu.weight. A nice level more or less is a quarter more or less of the rest.
NORMAL_WEIGHT = 100
WEIGHT_PER_NICE_LEVEL = 1.25
LOWEST_NICE, HIGHEST_NICE = -20, 19
#: Period of cpu.max, in microseconds.
CPU_PERIOD = 100_000
#: Seconds in which the kernel must accept the priority of a session: it accepts a few per second.
SESSION_TIMEOUT_SECONDS = 5.0
_CAP_SYS_NICE = 23
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


@dataclass(frozen=True)
class LimitSupport:
    """The means of this node to enforce limits.

    nice: level of this process, to which VMs' levels are relative. lowest: that it may set.
    """

    groups: cgroup.Delegation | None
    nice: int
    lowest: int

    def has(self, controller: str) -> bool:
        """Whether a controller of cgroup v2 is available for VMs."""
        return self.groups is not None and controller in self.groups.controllers


@dataclass(frozen=True)
class LimitPlan:
    """How to limit a VM. settings: its cgroup's files and their contents, in order.

    processors: average that a process throttles it to (``cpu_throttle``). unenforced: a sentence for
    each limit, or part of one, that this node cannot enforce.
    """

    settings: tuple[tuple[str, str], ...] = ()
    nice: int | None = None
    processors: float | None = None
    unenforced: tuple[str, ...] = ()


def resource_limit_settings(bounds: ResourceLimits, node: LimitSupport) -> tuple[tuple[str, str], ...]:
    """Return cgroup settings for resource limits; else its sandbox sets them. Pure."""
    settings = (
        ("memory.max", str(bounds.memory)),
        ("pids.max", str(bounds.processes)),
        ("cpu.max", f"{bounds.cpus * CPU_PERIOD} {CPU_PERIOD}"),
    )
    return tuple((file, content) for file, content in settings if node.has(file.partition(".")[0]))


def plan_limits(
    limits: VmLimits, processors: int, node: LimitSupport, devices: Iterable[str] | None
) -> LimitPlan:
    """Return how to enforce a VM's limits. Pure.

    Args:
        processors: of the VM.
        devices: of its disks, as io.max names them, or empty; None: its hypervisor limits them.
    """
    settings: list[tuple[str, str]] = []
    nice, share, unenforced_limits = None, None, []
    if limits.cpu_percent is not None:
        wanted_share = processors * limits.cpu_percent / 100
        if node.has("cpu"):
            settings.append(("cpu.max", f"{round(wanted_share * CPU_PERIOD)} {CPU_PERIOD}"))
        else:
            share = wanted_share
    if limits.cpu_weight is not None:
        if node.has("cpu"):
            settings.append(("cpu.weight", str(limits.cpu_weight)))
        else:
            nice, fault = _nice(limits.cpu_weight, node)
            unenforced_limits += [fault] if fault else []
    if limits.disk_bytes is not None and devices is not None:
        found, rate = set(devices), limits.disk_bytes
        if not node.has("io"):
            unenforced_limits.append(f"the speed of its disks is not limited: {_NO_IO}")
        elif "" in found:
            unenforced_limits.append(
                "the speed of its disks is not limited: not all lie on a disk of the node's"
            )
        else:
            settings += [("io.max", f"{one} rbps={rate} wbps={rate}") for one in sorted(found)]
    return LimitPlan(tuple(settings), nice, share, tuple(unenforced_limits))


_NO_IO = "uml needs a delegated cgroup with the controller io for that, and the node has none"


def nice_step(weight: int) -> int:
    """Nice levels of a weight, relative to the default weight; positive: less time."""
    step = round(math.log(NORMAL_WEIGHT / weight, WEIGHT_PER_NICE_LEVEL))
    return min(max(step, LOWEST_NICE), HIGHEST_NICE)


def _nice(weight: int, node: LimitSupport) -> tuple[int, str]:
    level = node.nice + nice_step(weight)
    reached = min(max(level, min(node.nice, node.lowest)), HIGHEST_NICE)
    if reached == level:
        return level, ""
    how = "not enforced" if reached == node.nice else f"enforced only as far as nice level {reached}"
    why = f"the agent may not set level {level}, and was delegated no cgroup"
    return reached, f"cpu_weight {weight} is {how}: {why}"


def detect_limit_support() -> LimitSupport:
    """Return the means of this node."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    lowest = 20 - min(resource.getrlimit(resource.RLIMIT_NICE)[0] % 2**64, 40)
    return LimitSupport(
        cgroup.find_delegation(), nice, LOWEST_NICE if _has_sys_nice() else min(nice, lowest)
    )


def _has_sys_nice() -> bool:
    return bool(int(procs.status_fields(os.getpid())["CapEff"], 16) >> _CAP_SYS_NICE & 1)


class LimitEnforcer:
    """Enforces the limits of a driver's VMs."""

    def __init__(self, kind: HypervisorKind) -> None:
        self._kind = kind

    def unenforced(self, limits: VmLimits, directory: Path) -> tuple[str, ...]:
        return self._plan(limits, 1, [directory]).unenforced

    def plan_limits(self, vm: VmConfig) -> LimitPlan:
        """Return how to limit a VM."""
        kept = resource_limit_settings(resource_limits_for(vm, self._kind), detect_limit_support())
        if vm.limits is None:
            return LimitPlan(kept)
        disk_paths = [vm.workdir, vm.image.root, *(disk.path for disk in vm.disks)]
        found = self._plan(vm.limits, vm.cpus, disk_paths)
        return replace(found, settings=kept + found.settings)

    def enforce(self, limit_plan: LimitPlan, name: str, find: Callable[[], list[int]]) -> None:
        """Limit a running VM. find: returns its processes.

        Raises:
            HypervisorError: a limit cannot be set.
        """
        if limit_plan.nice is not None:
            done: set[int] = set()
            while fresh := set(find()) - done:  # some were started before their parent was reniced
                for pid in fresh:
                    _renice(pid, limit_plan.nice)
                done |= fresh
        if limit_plan.settings:
            groups = cgroup.find_delegation()
            if groups is None:
                raise HypervisorError(f"cannot limit {name}: the agent's cgroup is gone")
            groups.enforce(name, limit_plan.settings, find)

    def remove(self, name: str) -> None:
        """Remove the cgroup of a VM that is gone."""
        groups = cgroup.find_delegation()
        if groups is not None:
            groups.remove(name)

    def _plan(self, limits: VmLimits, processors: int, disk_paths: list[Path]) -> LimitPlan:
        by_cgroup = not CAPABILITIES[self._kind].limits_disks
        devices = [cgroup.block_device(path) for path in disk_paths] if by_cgroup else None
        return plan_limits(limits, processors, detect_limit_support(), devices)


def _renice(pid: int, level: int) -> None:
    """Set the priority of a process, and of its session if autogroups are enabled."""
    try:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), level)
            if os.getsid(pid) == pid and _has_autogroups():
                _renice_session(Path(f"/proc/{pid}/autogroup"), level)
    except OSError as error:
        message = f"cannot set process {pid} to nice level {level}: {error.strerror}"
        raise HypervisorError(message) from error


def _has_autogroups() -> bool:
    with suppress(OSError):
        return _AUTOGROUP.read_text().strip() == "1"
    return False


def _renice_session(file: Path, level: int) -> None:
    deadline = time.monotonic() + SESSION_TIMEOUT_SECONDS
    while True:
        try:
            file.write_text(str(level))
        except OSError as error:
            if error.errno != errno.EAGAIN or time.monotonic() > deadline:
                raise
            time.sleep(0.02)  # the kernel accepts at most ten per second from all users
        else:
            return
