"""Arrays as large as they may be: on their way to the schedd, and taken back again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from grid_kit import PATIENCE, Grid, wait_for

from vmjobs.model import MAX_ARRAY, Job, JobAction, JobState

#: The submit side's own pool, which has no machines: what goes there stays in the queue.
NOWHERE = {"route": "local"}
#: So many seconds, on a machine that has nothing else to do.
QUEUED_SECONDS, CANCELED_SECONDS, ANSWER_SECONDS = 3, 10, 1


@contextmanager
def others_are_answered(grid: Grid) -> Iterator[None]:
    """Have somebody else ask the schedd all the while, who waits for no answer for long."""
    waits: list[float] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.1):
            began = time.monotonic()
            grid.on("submit", "condor_q", "-allusers", "-constraint", "false", user="physicist")
            waits.append(time.monotonic() - began)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        over.set()
        asking.join()
    print(f"others waited {max(waits):.1f} s at most")  # noqa: T201
    assert max(waits) < ANSWER_SECONDS * PATIENCE


def in_queue(grid: Grid, array: str) -> list[str]:
    constraint = f'VMJobsArray == "{array}"'
    found = grid.on("submit", "condor_q", "-allusers", "-constraint", constraint, "-af", "VMJobsId")
    return found.split()


def are(grid: Grid, array: str, so: Callable[[Job], bool]) -> bool:
    return all(so(job) for job in grid.api.jobs(array=array))


def test_the_largest_array_is_queued_and_canceled_in_seconds(grid: Grid) -> None:
    with others_are_answered(grid):
        began = time.monotonic()
        array = grid.submit("true", MAX_ARRAY, **NOWHERE)[0].array
        wait_for(lambda: are(grid, array, lambda job: job.condor is not None), "ids", QUEUED_SECONDS)
        queued = time.monotonic() - began
        assert len(in_queue(grid, array)) == MAX_ARRAY
        began = time.monotonic()
        grid.api.change_jobs(JobAction.CANCEL, [array])
        wait_for(
            lambda: are(grid, array, lambda job: job.state is JobState.CANCELED),
            "end",
            CANCELED_SECONDS,
        )
        canceled = time.monotonic() - began
    print(f"{MAX_ARRAY} jobs: queued in {queued:.1f} s, canceled in {canceled:.1f} s")  # noqa: T201
    assert in_queue(grid, array) == []


@pytest.mark.parametrize("when", ["it has begun", "the schedd has them"])
def test_a_worker_that_is_killed_on_the_way_submits_nothing_twice(grid: Grid, when: str) -> None:
    array = grid.submit("true", MAX_ARRAY, **NOWHERE)[0].array
    marker = f"/var/lib/vmjobs/spool/{array}/submitting"
    jobs = f"condor_q -allusers -limit 1 -constraint 'VMJobsArray == \"{array}\"' -af ClusterId"
    look = f"[ -e {marker} ]" if when == "it has begun" else f'[ "$({jobs})" ]'
    grid.on("submit", "timeout", "60", "sh", "-c", f"until {look}; do sleep 0.02; done")
    grid.on("worker", "pkill", "-KILL", "-f", "vmjobs worker")
    wait_for(lambda: are(grid, array, lambda job: job.condor is not None), "ids", 60)
    found = in_queue(grid, array)
    assert len(found) == len(set(found)) == MAX_ARRAY
    grid.api.change_jobs(JobAction.CANCEL, [array])
    wait_for(lambda: are(grid, array, lambda job: job.state is JobState.CANCELED), "end", 60)
