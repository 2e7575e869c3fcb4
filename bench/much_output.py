"""Benchmark 20: a job that prints a lot, as a transparent job and as a plain HTCondor job."""

from __future__ import annotations

from collections.abc import Iterator

from bench.figures import Finding, compare, in_turns
from bench.pool import condor_job
from tests.kit.grid import Grid

SIZE = 200_000_000
_SUBMIT = """\
executable = /usr/bin/head
transfer_executable = false
arguments = -c {size} /dev/zero
output = out
log = job.log
should_transfer_files = YES
request_memory = 128
request_disk = 512M
{line}
queue
"""


def much_output(grid: Grid, pairs: int) -> Iterator[Finding]:
    """Compare the times from submission at the site to the job's end, when its output is back."""

    def run(line: str) -> float:
        text = _SUBMIT.format(size=SIZE, line=line)
        return condor_job(grid, "site", {"job.sub": text}).seconds

    seen = in_turns(pairs, lambda: run('+VMJobImage = "generic"'), lambda: run(""))
    yield compare(
        20, f"{SIZE // 1_000_000} MB of stdout", seen, 1.5, measure="with +VMJobImage / plain"
    )
