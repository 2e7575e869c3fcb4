"""Benchmarks 6 and 7: a payload in a VM over a plain job; delay until a VM's end shows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.figures import Finding, compare, in_turns, percentile, spread
from bench.pool import Timed, boot_by_hand, condor_job, follow, run_job
from tests.kit.grid import Grid

#: Sleeping costs the same in a guest and on the host; another benchmark measures computing.
SECONDS = 5
PAYLOAD = f"#!/bin/sh\nsleep {SECONDS}\necho done\n"

#: The same route: a Condor-C job of the same user, from the same schedd to the same site.
SUBMIT = """\
universe = grid
grid_resource = condor site.grid site.grid
remote_universe = vanilla
executable = payload
output = job.out
error = job.err
log = job.log
should_transfer_files = YES
when_to_transfer_output = ON_EXIT
+remote_ShouldTransferFiles = "YES"
+remote_WhenToTransferOutput = "ON_EXIT"
request_cpus = 1
request_memory = 128
request_disk = 65536
queue
"""


def submit_to_result(grid: Grid, pairs: int, ends: int) -> Iterator[Finding]:
    """Compare pair by pair; then run an array of ``ends`` jobs to observe enough ends."""

    def ours() -> tuple[Timed, float]:
        job = run_job(grid, PAYLOAD)
        return job, boot_by_hand(grid, job.job.node, job.job)

    in_turns(1, ours, partial(plain_job, grid))  # brings images to the nodes; not counted
    found = in_turns(pairs, ours, partial(plain_job, grid))
    timed, boots = [job for (job, _), _ in found], [boot for (_, boot), _ in found]
    seen = [(job.total - boot, plain) for (job, boot), plain in found]
    details: dict[str, Any] = {
        "payload seconds": SECONDS,
        "job": spread([job.total for job in timed]),
        "boot by hand": spread(boots),
        "without the payload": spread([(a - SECONDS) / (b - SECONDS) for a, b in seen]),
        "our phases, seconds": [job.job.seconds for job in timed],
    }
    measure = "(VM job - boot) / plain job"
    yield compare(6, f"submit to result, sleep {SECONDS}", seen, 1.25, measure=measure, details=details)
    yield _noticed("one at a time", timed)
    began = time.monotonic()
    jobs = grid.submit("#!/bin/sh\nsleep $((VMJOBS_ARRAY_INDEX % 5))\n", ends)
    yield _noticed(f"{ends} jobs at once", follow(grid, jobs, began))


def plain_job(grid: Grid) -> float:
    return condor_job(grid, "submit", {"job.sub": SUBMIT, "payload": PAYLOAD}).seconds


def _noticed(how: str, timed: list[Timed]) -> Finding:
    seconds = [job.notice for job in timed if job.notice is not None]
    if not seconds:
        raise RuntimeError("no VM's process was seen: run the benchmarks on the grid's own host")
    value = percentile(seconds, 95)
    worst = max((job for job in timed if job.notice is not None), key=lambda job: job.notice or 0.0)
    details = {
        "longest": max(seconds),
        "longest of job": worst.job.id,
        "jobs": len(timed),
        "seen": len(seconds),
    }
    what = f"VM's end to final state, {how}"
    return Finding(7, what, seconds, (), "p95, s", value, None, 1.0, details=details)
