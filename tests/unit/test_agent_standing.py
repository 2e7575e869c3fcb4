"""Whether a node is fit for jobs, by how its last ones ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reports_kit import ended
from waiting_kit import Clock

from vmjobs.agent.standing import DOUBT_SECONDS, FIRST_REST, LIMIT, LONGEST_REST, Standing
from vmjobs.agent.verdict import Verdict, failed, stopped
from vmjobs.model import JobState, ReasonCode, reason

NODE = failed(ReasonCode.NODE_FAILED, "no space left", unfit=True).verdict
GIVEN_BACK = replace(NODE, state=JobState.PREEMPTED)
OWN_END = Verdict(JobState.FAILED, reason(ReasonCode.SCRIPT_FAILED, "exit 3"), ended(3))
UNBOOTED = failed(ReasonCode.BOOT_FAILED, "it powered off").verdict
HANGS = failed(ReasonCode.BOOT_TIMED_OUT, "not ready within 120 s").verdict


@pytest.fixture
def standing(clock: Clock) -> Standing:
    return Standing(clock)


def test_a_node_that_fails_three_in_a_row_rests_and_says_so(standing: Standing, clock: Clock) -> None:
    rests: list[str] = []
    standing.on_rest = lambda: rests.append(standing.fault())
    for verdict in (NODE, GIVEN_BACK):
        standing.note(verdict)
        assert standing.fault() == ""
    standing.note(NODE)
    (said,) = rests
    assert said.startswith("3 jobs in a row failed for the node's sake; it rests until 20")
    clock.now += FIRST_REST - 0.1
    assert standing.fault() == said
    clock.now += 0.2
    assert standing.fault() == ""


def test_one_that_goes_well_between_them_is_enough(standing: Standing) -> None:
    for verdict in (NODE, NODE, OWN_END, NODE, NODE):
        standing.note(verdict)
    assert standing.fault() == ""


def test_each_rest_is_twice_as_long_up_to_an_hour_until_one_goes_well(
    standing: Standing, clock: Clock
) -> None:
    for _ in range(LIMIT - 1):
        standing.note(NODE)
    found = []
    for _ in range(10):
        standing.note(NODE)
        begun = clock.now
        while standing.fault():
            clock.now += 1
        found.append(clock.now - begun)
    assert found[:3] == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST]
    assert found[-2:] == [LONGEST_REST, LONGEST_REST]
    standing.note(OWN_END)
    standing.note(NODE)
    assert standing.fault() == ""


def test_jobs_that_ran_already_change_nothing_unless_they_go_well(
    standing: Standing, clock: Clock
) -> None:
    for _ in range(LIMIT + 5):
        standing.note(NODE)
    assert standing.fault()
    clock.now += FIRST_REST
    assert standing.fault() == ""
    standing.note(NODE)
    assert standing.fault()
    standing.note(OWN_END)
    assert standing.fault() == ""


@pytest.mark.parametrize(
    "verdict",
    [
        stopped("vacated").verdict,
        failed(ReasonCode.IMAGE_UNAVAILABLE, "the repository is down").verdict,
        failed(ReasonCode.KERNEL_PANIC, "init died").verdict,
        failed(ReasonCode.GUEST_LOST, "silent").verdict,
        failed(ReasonCode.NODE_FAILED, "the image is larger than this node's cache").verdict,
        UNBOOTED,
        HANGS,
    ],
)
def test_what_is_not_the_nodes_fault_counts_for_nothing(standing: Standing, verdict: Verdict) -> None:
    for _ in range(LIMIT * 2):
        standing.note(verdict)
    assert standing.fault() == ""
    for _ in range(LIMIT):
        standing.note(NODE)
    assert standing.fault()


def test_a_hypervisor_is_in_doubt_once_three_machines_in_a_row_did_not_boot(
    standing: Standing, clock: Clock
) -> None:
    """Whoever is told has it boot something: whether it can is not the jobs' to say."""
    ends = (UNBOOTED, HANGS, OWN_END, HANGS, UNBOOTED, HANGS, UNBOOTED, HANGS)
    doubts = [standing.note(verdict) for verdict in ends]
    assert doubts == [False, False, False, False, False, True, False, False]
    assert not any(standing.note(UNBOOTED) for _ in range(9)), "it has been looked at just now"
    clock.now += DOUBT_SECONDS
    assert not standing.note(stopped("vacated").verdict), "that says nothing of any hypervisor"
    assert standing.note(UNBOOTED)
