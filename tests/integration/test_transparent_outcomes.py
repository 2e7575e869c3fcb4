"""Rows of the table of outcomes, forced, and checked where the job was submitted.

`condor_q -hold` shows the outcome at the origin, a hop of Condor-C away. If a row requeues the job,
the test allows the job one start only, so that it is held. All other rows hold the job at once,
without a second start. Jobs that do not disturb other tests are submitted together, and each test
checks one of them. Rows that take a fault are in test_transparent_outcomes_faults.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime

import pytest

from condor.events import outcomes
from tests.kit.grid import Grid, blank_disk, odd_images, wait_for
from tests.kit.outcome_rows import INITS, WAYS, assert_row, held, submit
from tests.kit.submit_host import PATIENT, Desk, Kind, Submitted, submitted


@pytest.fixture(scope="module")
def images(grid: Grid) -> Grid:
    """The grid, with images that misbehave; one needs hypervisors that a node may lack."""
    blank_disk(grid)
    odd_images(grid, INITS)
    return grid


@pytest.fixture(scope="module")
def tried_again(images: Grid) -> Iterator[tuple[Desk, str]]:
    """A job that fails three times, which it does while the other jobs run."""
    with Desk(images, "site") as desk:
        yield desk, desk.submit("true", image="test-powers-off", __VMJobMaxStarts="3")


@pytest.fixture(scope="module")
def jobs(
    images: Grid, tried_again: tuple[Desk, str], request: pytest.FixtureRequest
) -> Iterator[Submitted[str]]:
    """A job for each selected row; all are submitted before the tests check them."""
    asked = {
        item.callspec.params.get("code") for item in request.session.items if hasattr(item, "callspec")
    }
    found = {code: submit(images, code, way) for code, way in WAYS.items() if code in asked}
    with ExitStack() as desks:
        for desk, _ in found.values():
            desks.enter_context(desk)
        yield found


@pytest.mark.parametrize("code", WAYS)
def test_row(jobs: Submitted[str], code: str) -> None:
    way = WAYS[code]
    way.deed(*jobs[code])
    assert_row(code, way.said, held(*jobs[code]))


def test_what_is_tried_again_waits_for_longer_each_time_and_not_for_ever(
    tried_again: tuple[Desk, str],
) -> None:
    """Checked in the job log that HTCondor writes for the submitter."""
    desk, cluster = tried_again
    ad = held(desk, cluster)
    assert (ad["HoldReasonSubCode"], ad["NumJobStarts"]) == (122, 3), ad["HoldReason"]
    begun = re.findall(r"(?m)^001 \([0-9.]+\) (\S+ \S+) ", desk.read("log"))
    first, second, third = map(datetime.fromisoformat, begun)
    assert (second - first).total_seconds() >= outcomes.retry_delay_seconds(1)
    assert (third - second).total_seconds() >= outcomes.retry_delay_seconds(2)


TOLD_TO_LEAVE = "EVICTED: HTCondor told the job to leave its node (signal 15)"
#: How jobs are stopped, the JobStatus of each then, and what its ad says.
STOPS = {
    ("condor_rm",): (3, TOLD_TO_LEAVE),
    ("condor_hold",): (5, TOLD_TO_LEAVE),
    ("condor_vacate_job",): (1, TOLD_TO_LEAVE),
    # The program has no time to report more; its last report must not count as current.
    ("condor_vacate_job", "-fast"): (1, "EXEC_LOST: the program that runs the job was killed"),
}


@pytest.fixture(scope="module")
def stopped(grid: Grid) -> Iterator[Submitted[tuple[str, ...]]]:
    sleeps = Kind("exec sleep 1000")
    with submitted({deed: (Desk(grid, "site"), sleeps) for deed in STOPS}) as jobs:
        yield jobs


@pytest.mark.parametrize("deed", STOPS)
def test_a_job_that_was_stopped_says_so(
    stopped: Submitted[tuple[str, ...]], deed: tuple[str, ...]
) -> None:
    (desk, cluster), (status, told) = stopped[deed], STOPS[deed]
    desk.running(cluster)
    desk("condor_qedit", cluster, "VMJobOwnRequirements", "false")  # no node accepts it again
    desk(*deed, cluster)

    def look() -> str | None:
        state, reason = desk.shown(cluster)
        ad = desk.ad(cluster) or desk.ad(cluster, ended=True)
        there = ad.get("JobStatus") == status and reason.startswith(told)
        return state if there else None

    assert wait_for(look, f"job {cluster} to say how it left", PATIENT) == "PREEMPTED"
    changes = desk.changes()
    assert set(changes) == {"ChirpVMState"}
    assert len(changes) <= 4, "STAGING, BOOTING, RUNNING, and COLLECTING where there was time"
