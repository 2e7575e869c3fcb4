"""Whether a node is fit for jobs, by how its last ones ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reports_kit import ended
from waiting_kit import Clock

from vmjobs.agent.node_health import DOUBT_SECONDS, FIRST_REST, LIMIT, LONGEST_REST, NodeHealth
from vmjobs.agent.verdict import Verdict, failed, stopped
from vmjobs.model import JobState, ReasonCode, reason

NODE = failed(ReasonCode.NODE_FAILED, "no space left", unfit=True).verdict
GIVEN_BACK = replace(NODE, state=JobState.PREEMPTED)
OWN_END = Verdict(JobState.FAILED, reason(ReasonCode.SCRIPT_FAILED, "exit 3"), ended(3))
UNBOOTED = failed(ReasonCode.BOOT_FAILED, "it powered off").verdict
HANGS = failed(ReasonCode.BOOT_TIMED_OUT, "not ready within 120 s").verdict


@pytest.fixture
def health(clock: Clock) -> NodeHealth:
    return NodeHealth(clock)


def test_a_node_that_fails_three_in_a_row_rests_and_says_so(health: NodeHealth, clock: Clock) -> None:
    rests: list[str] = []
    health.on_rest = lambda: rests.append(health.fault())
    for verdict in (NODE, GIVEN_BACK):
        health.note(verdict)
        assert health.fault() == ""
    health.note(NODE)
    (said,) = rests
    assert said.startswith("3 jobs in a row failed because of this node; it takes no jobs until 20")
    clock.now += FIRST_REST - 0.1
    assert health.fault() == said
    clock.now += 0.2
    assert health.fault() == ""


def test_one_that_goes_well_between_them_is_enough(health: NodeHealth) -> None:
    for verdict in (NODE, NODE, OWN_END, NODE, NODE):
        health.note(verdict)
    assert health.fault() == ""


def test_each_rest_is_twice_as_long_up_to_an_hour_until_one_goes_well(
    health: NodeHealth, clock: Clock
) -> None:
    for _ in range(LIMIT - 1):
        health.note(NODE)
    found = []
    for _ in range(10):
        health.note(NODE)
        begun = clock.now
        while health.fault():
            clock.now += 1
        found.append(clock.now - begun)
    assert found[:3] == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST]
    assert found[-2:] == [LONGEST_REST, LONGEST_REST]
    health.note(OWN_END)
    health.note(NODE)
    assert health.fault() == ""


def test_jobs_that_ran_already_change_nothing_unless_they_go_well(
    health: NodeHealth, clock: Clock
) -> None:
    for _ in range(LIMIT + 5):
        health.note(NODE)
    assert health.fault()
    clock.now += FIRST_REST
    assert health.fault() == ""
    health.note(NODE)
    assert health.fault()
    health.note(OWN_END)
    assert health.fault() == ""


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
def test_what_is_not_the_nodes_fault_counts_for_nothing(health: NodeHealth, verdict: Verdict) -> None:
    for _ in range(LIMIT * 2):
        health.note(verdict)
    assert health.fault() == ""
    for _ in range(LIMIT):
        health.note(NODE)
    assert health.fault()


def test_a_hypervisor_is_in_doubt_once_three_machines_in_a_row_did_not_boot(
    health: NodeHealth, clock: Clock
) -> None:
    """Whoever is told has it boot something: whether it can is not the jobs' to say."""
    ends = (UNBOOTED, HANGS, OWN_END, HANGS, UNBOOTED, HANGS, UNBOOTED, HANGS)
    doubts = [health.note(verdict) for verdict in ends]
    assert doubts == [False, False, False, False, False, True, False, False]
    assert not any(health.note(UNBOOTED) for _ in range(9)), "it has been looked at just now"
    clock.now += DOUBT_SECONDS
    assert not health.note(stopped("vacated").verdict), "that says nothing of any hypervisor"
    assert health.note(UNBOOTED)
