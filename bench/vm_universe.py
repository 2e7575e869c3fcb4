"""Benchmark 15: the same guest as a VM universe job of HTCondor, and as a job of vmjobs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from bench.figures import Finding, compare
from bench.pool import condor_job, run_job
from tests.kit.faults import restart_startd
from tests.kit.grid import Grid, run, wait_for

HERE = Path(__file__).parent
NODE = "node1"
#: In the node's container: the program that prepares guests, and the directory of their disks.
PREPARE = "/tmp/vmjobs-bench-raw_boot.py"  # noqa: S108
DISKS = "/var/lib/vmjobs-bench"
DROP_IN = "/etc/condor/config.d/90-vm-universe.conf"
XML_SCRIPT = "/usr/local/bin/vm-universe-xml"

SCRIPT = "#!/bin/sh\necho done\n"
MEMORY = 128

QEMU_CONF = """\
user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
security_driver = "none"
namespaces = [ ]
cgroup_controllers = [ ]
"""

SUBMIT = """\
universe = vm
executable = bench
vm_type = kvm
vm_memory = {memory}
vm_networking = false
vm_no_output_vm = true
vm_disk = {disks}
should_transfer_files = NO
requirements = Machine == "{node}"
+VMJobsKernel = "{kernel}"
+VMJobsInitrd = "{initrd}"
+VMJobsKernelArguments = "{cmdline}"
log = job.log
queue
"""


def vm_universe(grid: Grid, pairs: int) -> Iterator[Finding]:
    """Compare pair by pair. The peer is submitted at the site itself, the shorter way."""
    seen: list[tuple[float, float]] = []
    logs: list[dict[str, float]] = []
    phases: list[dict[str, float]] = []
    fields = {"hypervisor": "qemu", "network": "none", "memory": MEMORY, "disk": 64}
    digest = run_job(grid, SCRIPT, **fields).job.image_digest  # warms up; not counted
    with _switched_on(grid):
        for number in range(pairs):
            submit = _prepare(grid, digest, number)
            timed = run_job(grid, SCRIPT, **fields)
            phases.append(timed.job.seconds)
            job = condor_job(grid, "site", {"job.sub": submit})
            _must_have_run(grid, number)
            seen.append((timed.total, job.seconds))
            logs.append(_phases(job.log))
    details = {"VM universe, seconds from submission": logs, "our phases, seconds": phases}
    what = "the same guest in HTCondor's VM universe"
    yield compare(15, what, seen, 10, measure="VM universe / ours", at_most=False, details=details)


@contextmanager
def _switched_on(grid: Grid) -> Iterator[None]:
    def on(*command: str) -> str:
        return grid.on(NODE, *command)

    container = grid.container(NODE)
    run("docker", "cp", str(HERE / "raw_boot.py"), f"{container}:{PREPARE}")
    run("docker", "cp", str(HERE / "vm-universe-xml"), f"{container}:{XML_SCRIPT}")
    # condor_vm-gahp only requires that the file is readable.
    made_kvm = on("sh", "-c", "test -e /dev/kvm || { : >/dev/kvm; echo made; }").strip() == "made"
    on("sh", "-c", f"printf %s '{QEMU_CONF}' >/etc/libvirt/qemu.conf")
    try:
        on("virtlogd", "-d")
        on("libvirtd", "-d")
        run("docker", "cp", str(HERE / "node-vm-universe.conf"), f"{container}:{DROP_IN}")
        restart_startd(grid, NODE)  # it reads VM_TYPE only when it starts
        wait_for(lambda: _offered(grid), f"the VM universe of {NODE}", 120)
        yield
    finally:
        on("rm", "-rf", DROP_IN, XML_SCRIPT, DISKS, *(["/dev/kvm"] if made_kvm else []))
        on("pkill", "-u", "root", "-x", "libvirtd|virtlogd")
        restart_startd(grid, NODE)
        wait_for(lambda: not _offered(grid) or None, f"the VM universe of {NODE} to go", 120)


def _offered(grid: Grid) -> bool:
    constraint = f'Machine == "{NODE}.grid" && HasVM && HasVMJobs'
    return bool(grid.on("site", "condor_status", "-constraint", constraint, "-af", "Name").strip())


def _prepare(grid: Grid, digest: str, number: int) -> str:
    """Lay out one guest's disks on the node; returns the description of its job."""
    where = f"{DISKS}/{number}"
    told = grid.on(NODE, "python3", PREPARE, "prepare", digest, where, SCRIPT, str(MEMORY))
    kernel, initrd, cmdline = told.splitlines()
    names = {"root": "vda:w", "job": "vdb:r", "scratch": "vdc:w", "output": "vdd:w"}
    disks = ",".join(f"{where}/{name}.disk:{how}:raw" for name, how in names.items())
    return SUBMIT.format(
        memory=MEMORY, disks=disks, node=f"{NODE}.grid", kernel=kernel, initrd=initrd, cmdline=cmdline
    )


def _must_have_run(grid: Grid, number: int) -> None:
    """Check the guest's output: a guest that never booted ends early, too."""
    head = grid.on(NODE, "head", "-c", "1024", f"{DISKS}/{number}/output.disk")
    if '{"code": 0}' not in head:
        raise RuntimeError(f"the guest of the VM universe did not do its job: {head[:200]!r}")


def _phases(log: str) -> dict[str, float]:
    """Seconds from submission to the job's start and to its end, from its log."""
    found = re.findall(r"^(\d{3}) \(\S+ (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", log, re.MULTILINE)
    times = {code: datetime.fromisoformat(when) for code, when in reversed(found)}
    names = {"001": "started", "005": "ended"}
    begun = times["000"]
    return {
        name: (times[code] - begun).total_seconds() for code, name in names.items() if code in times
    }
