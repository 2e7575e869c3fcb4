"""Benchmark 20: a job that prints a lot, as a transparent job and as a plain HTCondor job."""

from __future__ import annotations

from collections.abc import Iterator

from bench.figures import Finding, compare, in_turns
from bench.short_jobs import IN_A_VM, seconds_at_site
from tests.kit.grid import Grid

SIZE = 200_000_000
SUBMIT = f"""\
executable = /usr/bin/head
arguments = -c {SIZE} /dev/zero
output = out
request_disk = 512M
"""


def much_output(grid: Grid, pairs: int) -> Iterator[Finding]:
    """Compare the times from submission at the site to the job's end, when its output is back."""
    seen = in_turns(
        pairs,
        lambda: seconds_at_site(grid, SUBMIT + IN_A_VM),
        lambda: seconds_at_site(grid, SUBMIT),
    )
    what = f"{SIZE // 1_000_000} MB of stdout"
    yield compare(20, what, seen, 1.5, measure="with +VMJobImage / plain")
