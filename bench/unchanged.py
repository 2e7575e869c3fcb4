"""A transparent job over the same payload as a job of the REST API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

from bench.figures import Finding, compare
from bench.pool import boot_by_hand, condor_job, run_job
from bench.submit_to_result import PAYLOAD, SECONDS, SUBMIT, plain_job
from tests.kit.grid import Grid

#: The same job with one more line.
UNCHANGED = SUBMIT.replace("\nqueue\n", '\n+VMJobImage = "generic"\nqueue\n')
#: Reports first when it starts. Not every `date` has fractions of a second; file systems do.
STAMPED = PAYLOAD.replace("\n", "\n: >begun; stat -c %y begun\n", 1)


def unchanged(grid: Grid, pairs: int) -> Iterator[Finding]:
    """Compare three ways by the same route: by REST, with ``+VMJobImage``, and without a VM."""
    starts: list[tuple[float, float]] = []
    over_rest: list[tuple[float, float]] = []
    over_plain: list[tuple[float, float]] = []
    for number in range(pairs + 1):
        began = time.time()
        rest = run_job(grid, STAMPED)
        ours = condor_job(grid, "submit", {"job.sub": UNCHANGED, "payload": STAMPED})
        without = plain_job(grid)
        boot = boot_by_hand(grid, rest.job.node, rest.job)
        if number:  # the first pair brings images to nodes, and the gridmanager to its site
            starts.append((begun(ours.out) - ours.began, begun(grid.out(rest.job)) - began))
            over_rest.append((ours.seconds, rest.total))
            over_plain.append((ours.seconds - boot, without))
    what = f"+VMJobImage: submit to result, sleep {SECONDS}"
    yield compare(6, what, over_plain, 1.25, measure="(VM job - boot) / plain job")
    details = {"submit to result, over REST": over_rest}
    yield compare(0, "+VMJobImage: submit to start, over REST", starts, 1.25, details=details)


def begun(out: str) -> float:
    """When a payload started, in seconds of the epoch; its guest has this host's clock."""
    day, moment, zone = out.split("\n", 1)[0].split()
    return datetime.fromisoformat(f"{day}T{moment[:15]}{zone}").timestamp()
