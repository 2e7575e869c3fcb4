"""An unchanged job of HTCondor's in a machine, over the same payload as a job of the REST API's."""

from __future__ import annotations

from collections.abc import Iterator

from figures import Finding, compare
from grid_kit import Grid
from pool import boot_by_hand, condor_job, run_job
from submit_to_result import PAYLOAD, SECONDS, SUBMIT, plain_job

#: The same job with one more line.
UNCHANGED = SUBMIT.replace("\nqueue\n", '\n+VMJobImage = "generic"\nqueue\n')


def unchanged(grid: Grid, pairs: int) -> Iterator[Finding]:
    """Compare three ways by the same route: by REST, with ``+VMJobImage``, and without a machine."""
    over_rest: list[tuple[float, float]] = []
    over_plain: list[tuple[float, float]] = []
    for number in range(pairs + 1):
        rest = run_job(grid, PAYLOAD)
        ours, _ = condor_job(grid, "submit", {"job.sub": UNCHANGED, "payload": PAYLOAD})
        without = plain_job(grid)
        boot = boot_by_hand(grid, rest.job.node, rest.job)
        if number:  # the first brings images to nodes, and the gridmanager to its site
            over_rest.append((ours, rest.total))
            over_plain.append((ours - boot, without))
    what = f"+VMJobImage: submit to result, sleep {SECONDS}"
    yield compare(6, what, over_plain, 1.25, measure="(VM job - boot) / plain job")
    yield compare(0, f"{what}, over REST", over_rest, 1.25)
