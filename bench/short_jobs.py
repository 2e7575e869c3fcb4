"""Benchmark 17: many jobs that do nothing, as transparent jobs and as plain HTCondor jobs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.figures import Finding, compare, in_turns
from bench.pool import condor_job
from tests.kit.grid import Grid

COUNTS = (60, 200)
_SUBMIT = """\
executable = /bin/true
transfer_executable = false
log = job.log
should_transfer_files = YES
request_memory = 128
request_disk = 65536
{line}
queue {count}
"""
_IN_A_VM = '+VMJobImage = "generic"'


def short_jobs(grid: Grid, pairs: int) -> Iterator[Finding]:
    """Compare the times from submission at the site to the last job's end."""

    def run(count: int, line: str) -> float:
        return condor_job(grid, "site", {"job.sub": _SUBMIT.format(line=line, count=count)}).seconds

    run(2, _IN_A_VM)  # brings the image to the nodes; not counted
    for count in COUNTS:
        times = max(1, pairs * COUNTS[0] // count)
        seen = in_turns(times, partial(run, count, _IN_A_VM), partial(run, count, ""))
        yield compare(17, f"{count} x /bin/true", seen, 2.0, measure="with +VMJobImage / plain")
