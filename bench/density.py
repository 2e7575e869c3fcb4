"""Benchmark 12: VMs of many transparent jobs at once on one node."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

from bench.figures import Finding
from tests.kit.faults import room
from tests.kit.grid import Grid

NODE = "node1"
#: Memory of a VM in MiB, and what HTCondor rounds it to.
MEMORY, ROUNDED = 96, 128
#: Every job runs for this many seconds per job: the last job starts before the first ends.
SECONDS = 2
#: Seconds for the whole benchmark.
PATIENCE = 1800

SUBMIT = f"""\
executable = payload
arguments = $(Process) {{seconds}}
output = out.$(Process)
error = err
log = job.log
should_transfer_files = YES
request_memory = {MEMORY}
request_disk = 16MB
requirements = Machine == "{NODE}.grid"
+VMJobImage = "generic"
queue {{jobs}}
"""
PAYLOAD = "#!/bin/sh\nsleep $2\necho job $1 in $(uname -n)\n"


def density(grid: Grid, jobs: int) -> Iterator[Finding]:
    seconds = SECONDS * jobs
    with room(grid, NODE, jobs, ROUNDED * jobs):
        before = _agent(grid)
        began = time.monotonic()
        folder = _submit(grid, SUBMIT.format(jobs=jobs, seconds=seconds))
        most = _follow(grid, folder, jobs, began)
        took = time.monotonic() - began
        after = _agent(grid)
        lost = jobs - _ended_well(grid, folder, jobs)
        left = _vms(grid)
        grid.on("site", "rm", "-rf", folder)
    details: dict[str, Any] = {
        "VMs at once, at most": most,
        "VMs left": left,
        "agent's processor time, s": after["seconds"] - before["seconds"],
        "agent's memory, KiB: before, at most": [before["memory"], after["most memory"]],
        "job lasts, s": seconds,
    }
    if left or most < jobs:
        raise RuntimeError(f"this was no measurement: {details}")
    what = f"{jobs} transparent jobs in VMs at once on one node"
    yield Finding(
        12, what, [took], [], "jobs lost", lost, None, 0, details=details, shown=list(details)
    )


def _submit(grid: Grid, submit: str) -> str:
    folder = grid.on("site", "mktemp", "-d", "/run/lock/bench-XXXXXX", user="vmjobs").strip()
    for name, text in (("job.sub", submit), ("payload", PAYLOAD)):
        write = ("sh", "-c", 'printf %s "$1" >"$2"', "sh", text, f"{folder}/{name}")
        grid.on("site", *write, user="vmjobs")
    grid.on("site", "sh", "-c", f"cd {folder} && condor_submit -terse job.sub", user="vmjobs")
    return folder


def _follow(grid: Grid, folder: str, jobs: int, began: float) -> int:
    """Wait until all jobs have ended or are held; returns the most VMs at once."""
    most = 0
    while time.monotonic() < began + PATIENCE:
        ended = len(re.findall(r"(?m)^(?:005|009|012) \(", grid.on("site", "cat", f"{folder}/job.log")))
        most = max(most, _vms(grid))
        if ended >= jobs:
            return most
        time.sleep(10)  # each look scans thousands of processes
    raise RuntimeError(f"not all had ended after {PATIENCE} s; {most} VMs at once at most")


def _vms(grid: Grid) -> int:
    """Count running VMs: a sandbox's first process has its name and its kernel's arguments."""
    return int(grid.on(NODE, "pgrep", "-fc", "vmjobs-sandbox.*umid=vmjobs-", check=False))


def _ended_well(grid: Grid, folder: str, jobs: int) -> int:
    """Count the jobs with exit status 0 and exactly the expected output."""
    log = grid.on("site", "cat", f"{folder}/job.log")
    outputs = grid.on("site", "sh", "-c", f"cat {folder}/out.*").splitlines()
    expected = {f"job {number} in vmjob-0" for number in range(jobs)}
    well = len(re.findall(r"Normal termination \(return value 0\)", log))
    return min(well, len(expected & set(outputs)) if len(outputs) == len(set(outputs)) else 0)


def _agent(grid: Grid) -> dict[str, float]:
    """Processor time in seconds and memory in KiB of the agent's process."""
    show = "pid=$(pgrep -of 'vmjobs agent'); ps -o cputimes=,rss= -p $pid; grep VmHWM /proc/$pid/status"
    words = grid.on(NODE, "sh", "-c", show).split()
    return {"seconds": float(words[0]), "memory": float(words[1]), "most memory": float(words[3])}
