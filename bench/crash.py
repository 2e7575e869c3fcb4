"""Benchmark 13: what remains after ``kill -9`` of an agent with runs at each of its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.figures import Finding
from tests.kit.grid import Grid, wait_for
from tests.kit.steps import CLEAN, JOBS, NODE, Volley, fired, left, stage

#: Lists the attempts that an agent has on its node, by the directories of their runs.
RUNS = "ls /var/lib/vmjobs/agent/runs"


def crash(grid: Grid) -> Iterator[Finding]:
    with stage(grid), fired(grid) as volley:
        volley.settle()
        attempts = grid.on(NODE, "sh", "-c", RUNS).split()
        grid.on(NODE, "pkill", "-KILL", "-f", "vmjobs agent")
        began = time.monotonic()
        found = _leaked(volley, attempts)
        seconds = time.monotonic() - began
        volley.open()
        volley.assert_ended_well()
        volley.assert_nothing_left()
        what = f"kill -9 of the agent, {sum(JOBS.values())} runs, one at each step"
        details = {"runs with a directory": len(attempts), "left": found}
        yield Finding(13, what, [seconds], [], "left", len(found), None, 0, details=details)


def _leaked(volley: Volley, attempts: list[str]) -> list[str]:
    """What two heartbeats have not removed; returns early once nothing remains."""
    found: list[str] = []

    def gone() -> bool:
        found[:] = [line for line in left(volley.grid) if any(one in line for one in attempts)]
        return not found

    try:
        wait_for(gone, "nothing of those runs to be left", CLEAN)
    except AssertionError:
        return found
    return []
