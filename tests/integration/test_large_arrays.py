"""Arrays of the maximum size: their submission, hold, release and cancellation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.kit.grid import Grid, wait_for
from tests.kit.waiting import PATIENCE
from vmjobs.model import MAX_ARRAY, Job, JobAction, JobState

#: A thousand jobs keep the schedd from answering other tests in time.
pytestmark = pytest.mark.disruptive
#: The submit host's own pool, which has no nodes: its jobs stay in the queue.
NOWHERE: dict[str, Any] = {"route": "local"}
#: Seconds: a few times the measured values, far below those of one submission per job.
QUEUED_SECONDS, CHANGED_SECONDS, ANSWER_SECONDS = 30, 60, 10


@contextmanager
def others_are_answered(grid: Grid) -> Iterator[None]:
    """Query the schedd as another user all the while; assert that no answer takes long."""
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


def change(grid: Grid, array: str, action: JobAction, state: JobState, seconds: float) -> float:
    """Cancel, hold or release an array; return the seconds until its jobs reach a state."""
    began = time.monotonic()
    grid.api.change_jobs(action, [array])
    wait_for(lambda: are(grid, array, lambda job: job.state is state), f"jobs to be {state}", seconds)
    return time.monotonic() - began


def test_the_largest_array_is_queued_held_released_and_canceled_in_seconds(grid: Grid) -> None:
    with others_are_answered(grid):
        began = time.monotonic()
        array = grid.submit("true", MAX_ARRAY, **NOWHERE)[0].array
        wait_for(lambda: are(grid, array, lambda job: job.condor is not None), "ids", QUEUED_SECONDS)
        queued = time.monotonic() - began
        assert len(in_queue(grid, array)) == MAX_ARRAY
        held = change(grid, array, JobAction.HOLD, JobState.HELD, CHANGED_SECONDS)
        released = change(grid, array, JobAction.RELEASE, JobState.QUEUED, CHANGED_SECONDS)
        canceled = change(grid, array, JobAction.CANCEL, JobState.CANCELED, CHANGED_SECONDS)
    print(  # noqa: T201
        f"{MAX_ARRAY} jobs: queued in {queued:.1f} s, held in {held:.1f} s, "
        f"released in {released:.1f} s, canceled in {canceled:.1f} s"
    )
    assert in_queue(grid, array) == []


@pytest.mark.soak  # test_crash.py kills the worker, test_condor_grid.py cuts submissions short
@pytest.mark.parametrize("when", ["it has begun", "the schedd has them"])
def test_a_worker_that_is_killed_on_the_way_submits_nothing_twice(grid: Grid, when: str) -> None:
    array = grid.submit("true", MAX_ARRAY, **NOWHERE)[0].array
    marker = f"/var/lib/vmjobs/spool/{array}/submitting"
    jobs = f"condor_q -allusers -limit 1 -constraint 'VMJobsArray == \"{array}\"' -af ClusterId"
    look = f"[ -e {marker} ]" if when == "it has begun" else f'[ "$({jobs})" ]'
    grid.on("submit", "timeout", "60", "sh", "-c", f"until {look}; do sleep 0.02; done")
    grid.on(
        "worker", "pkill", "-KILL", "-f", "vmjobs worker", check=False
    )  # pkill may end with its container
    wait_for(lambda: are(grid, array, lambda job: job.condor is not None), "ids", 60)
    found = in_queue(grid, array)
    assert len(found) == len(set(found)) == MAX_ARRAY
    change(grid, array, JobAction.CANCEL, JobState.CANCELED, 60)
