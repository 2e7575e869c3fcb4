"""How many VMs a cluster gets: the table of ``vmjobs.cluster.autoscaler``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from vmjobs.cluster.autoscaler import (
    WAKE_DURATION,
    Demand,
    ScaleDownDelay,
    SizeDecision,
    can_wake,
    decide_size,
    still_woken,
)
from vmjobs.cluster.spec import ClusterSpec, SizeRange

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SPEC = ClusterSpec.model_validate(
    {"name": "vc", "image": "worker", "size": {"min": 1, "max": 8}, "idle_seconds": 100}
)


def slack(seconds: float, most: int) -> ScaleDownDelay:
    return ScaleDownDelay(NOW - timedelta(seconds=seconds), most)


def jobs(count: int, busy: int = 0) -> Demand:
    return Demand(count, count, busy)


def many(target: int, why: str, kept: ScaleDownDelay | None = None) -> SizeDecision:
    """A decision for that many VMs; its message is their number, then ``why``."""
    return SizeDecision(target, kept, f"{target} VM{'s' * (target != 1)}: {why}")


IDLE = "idle jobs that only this cluster can run"

#: The target, the remembered scale-down delay, the demand, and the decision.
TABLE: dict[str, tuple[int, ScaleDownDelay | None, Demand | None, SizeDecision]] = {
    "as many as are needed": (3, None, jobs(1, busy=2), SizeDecision(3)),
    "more at once": (1, None, jobs(3), many(3, f"3 {IDLE}")),
    "beside those that run jobs": (
        2,
        None,
        jobs(1, busy=2),
        many(3, "1 idle job that only this cluster can run; 2 run jobs already"),
    ),
    "several jobs in one machine": (1, None, Demand(jobs=7, vms=2), many(2, f"7 {IDLE}")),
    "never more than max": (7, None, jobs(100), many(8, f"100 {IDLE}")),
    "never fewer than min": (1, None, jobs(0), SizeDecision(1)),
    "a higher min": (0, None, jobs(0), many(1, "0 run jobs, and the declared minimum is kept")),
    "fewer with patience": (5, None, jobs(2), SizeDecision(5, slack(0, 2))),
    "it waits": (5, slack(99, 2), jobs(2), SizeDecision(5, slack(99, 2))),
    "most of what was needed meanwhile": (5, slack(50, 2), jobs(4), SizeDecision(5, slack(50, 4))),
    "not the least": (5, slack(50, 4), jobs(2), SizeDecision(5, slack(50, 4))),
    "then those that nobody needed go": (
        5,
        slack(100, 2),
        jobs(1),
        many(2, "no more were needed for 100 s", slack(0, 1)),
    ),
    "down to min": (5, slack(100, 1), jobs(0), many(1, "no more were needed for 100 s")),
    "demand that is back ends the wait": (5, slack(99, 2), jobs(5), SizeDecision(5)),
    "machines that run jobs are needed": (
        5,
        slack(100, 5),
        jobs(0, busy=4),
        SizeDecision(5, slack(0, 4)),
    ),
    "nobody can tell": (5, slack(1000, 1), None, SizeDecision(5)),
    "an operator made it smaller": (2, slack(100, 4), jobs(1), SizeDecision(2, slack(0, 1))),
}


@pytest.mark.parametrize("case", TABLE, ids=list(TABLE))
def test_the_table(case: str) -> None:
    target, kept, demand, expected = TABLE[case]
    assert decide_size(SPEC, target, kept, demand, NOW) == expected


#: The declared minimum and maximum, the target, the demand, and the decision for a woken cluster.
AWAKE_TABLE: dict[str, tuple[int, int, int, Demand | None, SizeDecision]] = {
    "it keeps its machine": (0, 8, 1, jobs(0), SizeDecision(1)),
    "it gets more as ever": (0, 8, 1, jobs(2), many(2, f"2 {IDLE}")),
    "others may go": (0, 8, 3, jobs(0), SizeDecision(3, slack(0, 1))),
    "an operator put it back to sleep": (0, 8, 0, jobs(0), SizeDecision(0)),
    "it may have none by now": (0, 0, 1, jobs(0), SizeDecision(1, slack(0, 0))),
    "nobody can tell": (0, 8, 1, None, SizeDecision(1)),
}


@pytest.mark.parametrize("case", AWAKE_TABLE, ids=list(AWAKE_TABLE))
def test_who_was_woken(case: str) -> None:
    least, most, target, demand, expected = AWAKE_TABLE[case]
    spec = SPEC.model_copy(update={"size": SizeRange(min=least, max=most)})
    assert decide_size(spec, target, None, demand, NOW, is_awake=True) == expected


@pytest.mark.parametrize(
    ("ago", "demand", "still"),
    [
        (WAKE_DURATION / 2, jobs(0), True),
        (WAKE_DURATION / 2, None, True),
        (WAKE_DURATION / 2, jobs(1), False),
        (WAKE_DURATION / 2, jobs(0, busy=1), False),
        (WAKE_DURATION, None, False),
    ],
)
def test_it_is_kept_awake_until_there_is_demand_or_time_is_over(
    ago: timedelta, demand: Demand | None, still: bool
) -> None:
    assert still_woken(NOW - ago, demand, NOW) == (NOW - ago if still else None)
    assert still_woken(None, demand, NOW) is None


@pytest.mark.parametrize(
    ("declared", "target", "expected"),
    [
        (SizeRange(min=0, max=1), 0, True),
        (SizeRange(min=0, max=1), 1, False),
        (SizeRange(min=0, max=0), 0, False),
        (0, 0, False),
    ],
)
def test_who_sleeps(declared: int | SizeRange, target: int, expected: bool) -> None:
    assert can_wake(SPEC.model_copy(update={"size": declared}), target) is expected
