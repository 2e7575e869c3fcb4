"""Health of a node, from the outcomes of its recent jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kit.reports import ended
from tests.kit.waiting import Clock
from vmjobs.agent.node_health import (
    FAILURE_LIMIT,
    FIRST_REST_SECONDS,
    LONGEST_REST_SECONDS,
    REPROBE_SECONDS,
    NodeHealth,
)
from vmjobs.agent.run.outcome import RunOutcome, run_failed, run_stopped
from vmjobs.model import JobState, ReasonCode, reason

NODE = run_failed(ReasonCode.NODE_FAILED, "no space left", node_at_fault=True).outcome
GIVEN_BACK = replace(NODE, state=JobState.PREEMPTED)
OWN_END = RunOutcome(JobState.FAILED, reason(ReasonCode.SCRIPT_FAILED, "exit 3"), ended(3))
UNBOOTED = run_failed(ReasonCode.BOOT_FAILED, "it powered off").outcome
HANGS = run_failed(ReasonCode.BOOT_TIMED_OUT, "not ready within 120 s").outcome


@pytest.fixture
def health(clock: Clock) -> NodeHealth:
    return NodeHealth(clock)


def test_a_node_that_fails_three_in_a_row_rests_and_says_so(health: NodeHealth, clock: Clock) -> None:
    rests: list[str] = []
    health.on_rest = lambda: rests.append(health.fault())
    for outcome in (NODE, GIVEN_BACK):
        health.count_run(outcome)
        assert health.fault() == ""
    health.count_run(NODE)
    (said,) = rests
    assert said.startswith("3 jobs in a row failed because of this node; it takes no jobs until 20")
    clock.now += FIRST_REST_SECONDS - 0.1
    assert health.fault() == said
    clock.now += 0.2
    assert health.fault() == ""


def test_each_rest_is_twice_as_long_up_to_an_hour_until_one_goes_well(
    health: NodeHealth, clock: Clock
) -> None:
    for _ in range(FAILURE_LIMIT - 1):
        health.count_run(NODE)
    found = []
    for _ in range(10):
        health.count_run(NODE)
        begun = clock.now
        while health.fault():
            clock.now += 1
        found.append(clock.now - begun)
    assert found[:3] == [FIRST_REST_SECONDS, 2 * FIRST_REST_SECONDS, 4 * FIRST_REST_SECONDS]
    assert found[-2:] == [LONGEST_REST_SECONDS, LONGEST_REST_SECONDS]
    health.count_run(OWN_END)
    health.count_run(NODE)
    assert health.fault() == ""


def test_jobs_that_ran_already_change_nothing_unless_they_go_well(
    health: NodeHealth, clock: Clock
) -> None:
    for _ in range(FAILURE_LIMIT + 5):
        health.count_run(NODE)
    assert health.fault()
    clock.now += FIRST_REST_SECONDS
    assert health.fault() == ""
    health.count_run(NODE)
    assert health.fault()
    health.count_run(OWN_END)
    assert health.fault() == ""


@pytest.mark.parametrize(
    "outcome",
    [
        run_stopped("vacated").outcome,
        run_failed(ReasonCode.IMAGE_UNAVAILABLE, "the repository is down").outcome,
        run_failed(ReasonCode.KERNEL_PANIC, "init died").outcome,
        run_failed(ReasonCode.GUEST_LOST, "silent").outcome,
        run_failed(ReasonCode.NODE_FAILED, "the image is larger than this node's cache").outcome,
        UNBOOTED,
        HANGS,
    ],
)
def test_what_is_not_the_nodes_fault_counts_for_nothing(
    health: NodeHealth, outcome: RunOutcome
) -> None:
    for _ in range(FAILURE_LIMIT * 2):
        health.count_run(outcome)
    assert health.fault() == ""
    for _ in range(FAILURE_LIMIT):
        health.count_run(NODE)
    assert health.fault()


def test_a_hypervisor_is_in_doubt_once_three_vms_in_a_row_did_not_boot(
    health: NodeHealth, clock: Clock
) -> None:
    """True requests a probe: a probe decides whether the hypervisor works, not the jobs."""
    ends = (UNBOOTED, HANGS, OWN_END, HANGS, UNBOOTED, HANGS, UNBOOTED, HANGS)
    doubts = [health.count_run(outcome) for outcome in ends]
    assert doubts == [False, False, False, False, False, True, False, False]
    assert not any(health.count_run(UNBOOTED) for _ in range(9)), "it has been looked at just now"
    clock.now += REPROBE_SECONDS
    assert not health.count_run(run_stopped("vacated").outcome), "that says nothing of any hypervisor"
    assert health.count_run(UNBOOTED)
