"""Benchmark 17: many jobs that do nothing, as transparent jobs and as plain HTCondor jobs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.figures import Finding, compare, in_turns
from bench.pool import condor_job
from tests.kit.grid import Grid

COUNTS = (60, 200)
SUBMIT = "executable = /bin/true\nrequest_disk = 65536\n"
IN_A_VM = '+VMJobImage = "generic"\n'
_COMMON = """\
transfer_executable = false
log = job.log
should_transfer_files = YES
request_memory = 128
"""


def short_jobs(grid: Grid, pairs: int) -> Iterator[Finding]:
    """Compare the times from submission at the site to the last job's end."""
    seconds_at_site(grid, SUBMIT + IN_A_VM, 2)  # brings the image to the nodes; not counted
    for count in COUNTS:
        seen = in_turns(
            max(1, pairs * COUNTS[0] // count),
            partial(seconds_at_site, grid, SUBMIT + IN_A_VM, count),
            partial(seconds_at_site, grid, SUBMIT, count),
        )
        yield compare(17, f"{count} x /bin/true", seen, 2.0, measure="with +VMJobImage / plain")


def seconds_at_site(grid: Grid, submit: str, count: int = 1) -> float:
    """Submit jobs at the site itself; return the seconds until the last one has ended."""
    text = f"{submit}{_COMMON}queue {count}\n"
    return condor_job(grid, "site", {"job.sub": text}).seconds
