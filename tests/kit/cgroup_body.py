"""Run by test_cgroup.py as root of a separate kernel, in a group delegated to it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from vmjobs.hypervisor.base import BootImage, VmConfig, VmLimits
from vmjobs.hypervisor.procs import children
from vmjobs.hypervisor.sandbox.cgroup import find_delegation
from vmjobs.hypervisor.sandbox.cpu_throttle import processor_seconds
from vmjobs.hypervisor.sandbox.limit_enforcement import LimitEnforcer
from vmjobs.model import HypervisorKind

GROUP = Path("/sys/fs/cgroup/agent.service")
DISK = Path("/mnt/disk")
HOLDER = LimitEnforcer(HypervisorKind.UML)


def tell(what: str, value: object) -> None:
    sys.stdout.write(f"{what}: {value}\n")


def vm(limits: VmLimits | None) -> VmConfig:
    image = BootImage("", DISK / "root")
    image.root.touch()
    return VmConfig("vmjobs-1", 1, 64, image, (), DISK / "console", DISK, limits=limits)


def processors() -> None:
    limits = VmLimits(cpu_percent=30, cpu_weight=50, disk_bytes=1 << 20)
    tell("unenforced", HOLDER.unenforced(limits, DISK))
    held = HOLDER.plan_limits(vm(limits))
    with subprocess.Popen(["sh", "-c", "(while :; do :; done) & while :; do :; done"]) as busy:
        HOLDER.enforce(held, "vmjobs-1", lambda: [busy.pid, *children(busy.pid)])
        began, before = time.monotonic(), processor_seconds(busy.pid)
        threading.Event().wait(5)
        tell("share", (processor_seconds(busy.pid) - before) / (time.monotonic() - began))
        tell("weight", (GROUP / "vmjobs-1" / "cpu.weight").read_text().strip())
        for pid in (*children(busy.pid), busy.pid):
            os.kill(pid, 9)
    HOLDER.remove("vmjobs-1")


def disks() -> None:
    write = f"read go; exec dd if=/dev/zero of={DISK}/file bs=64k count=64 oflag=direct status=none"
    held = HOLDER.plan_limits(vm(VmLimits(disk_bytes=2 << 20)))
    with subprocess.Popen(["sh", "-c", write], stdin=subprocess.PIPE) as writer:
        HOLDER.enforce(held, "vmjobs-1", lambda: [writer.pid])
        began = time.monotonic()
        writer.communicate(b"go\n")
        tell("writing", time.monotonic() - began)
    HOLDER.remove("vmjobs-1")
    HOLDER.remove("vmjobs-1")


def bounds() -> None:
    """Show the limits of a VM that is configured without any."""
    with subprocess.Popen(["sleep", "600"]) as idle:
        HOLDER.enforce(HOLDER.plan_limits(vm(None)), "vmjobs-1", lambda: [idle.pid])
        for name in ("memory.max", "pids.max", "pids.current", "cpu.max"):
            tell(name, (GROUP / "vmjobs-1" / name).read_text().strip())
        idle.kill()
    HOLDER.remove("vmjobs-1")


tell("before", find_delegation())
os.setxattr(GROUP, "user.delegate", b"1")
(GROUP / "cgroup.procs").write_text(str(os.getpid()))
tell("not apart", find_delegation())
(GROUP / "agent" / "cgroup.procs").write_text(str(os.getpid()))
processors()
disks()
bounds()
tell("groups", " ".join(path.name for path in GROUP.iterdir() if path.is_dir()))
tell("done", "all of it")
