"""How many machines a cluster is to have: the table of ``vmjobs.cluster.demand``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from vmjobs.cluster.demand import AWAKE, Demand, Sizing, Slack, held, size, wakes
from vmjobs.cluster.spec import ClusterSpec, Size

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SPEC = ClusterSpec.model_validate(
    {"name": "vc", "image": "worker", "size": {"min": 1, "max": 8}, "idle_seconds": 100}
)


def slack(seconds: float, most: int) -> Slack:
    return Slack(NOW - timedelta(seconds=seconds), most)


def jobs(count: int, busy: int = 0) -> Demand:
    return Demand(count, count, busy)


def many(target: int, why: str, kept: Slack | None = None) -> Sizing:
    """That many machines from now on; why, after their number."""
    return Sizing(target, kept, f"{target} machine{'s' * (target != 1)}: {why}")


IDLE = "idle jobs that only this cluster can run"

#: The target, what was remembered, what there is to do, and what follows.
TABLE: dict[str, tuple[int, Slack | None, Demand | None, Sizing]] = {
    "as many as are needed": (3, None, jobs(1, busy=2), Sizing(3)),
    "more at once": (1, None, jobs(3), many(3, f"3 {IDLE}")),
    "beside those that run jobs": (
        2,
        None,
        jobs(1, busy=2),
        many(3, "1 idle job that only this cluster can run; 2 run jobs already"),
    ),
    "several jobs in one machine": (1, None, Demand(jobs=7, machines=2), many(2, f"7 {IDLE}")),
    "never more than max": (7, None, jobs(100), many(8, f"100 {IDLE}")),
    "at max it stays": (8, None, jobs(100), Sizing(8)),
    "never fewer than min": (1, None, jobs(0), Sizing(1)),
    "a higher min": (0, None, jobs(0), many(1, "0 run jobs, and the declared minimum is kept")),
    "fewer with patience": (5, None, jobs(2), Sizing(5, slack(0, 2))),
    "it waits": (5, slack(99, 2), jobs(2), Sizing(5, slack(99, 2))),
    "most of what was needed meanwhile": (5, slack(50, 2), jobs(4), Sizing(5, slack(50, 4))),
    "not the least": (5, slack(50, 4), jobs(2), Sizing(5, slack(50, 4))),
    "then those that nobody needed go": (
        5,
        slack(100, 2),
        jobs(1),
        many(2, "no more were needed for 100 s", slack(0, 1)),
    ),
    "down to min": (5, slack(100, 1), jobs(0), many(1, "no more were needed for 100 s")),
    "demand that is back ends the wait": (5, slack(99, 2), jobs(5), Sizing(5)),
    "or makes it grow": (5, slack(99, 2), jobs(6), many(6, f"6 {IDLE}")),
    "machines that run jobs are needed": (5, slack(100, 5), jobs(0, busy=4), Sizing(5, slack(0, 4))),
    "nobody can tell": (5, slack(1000, 1), None, Sizing(5)),
    "an operator made it smaller": (2, slack(100, 4), jobs(1), Sizing(2, slack(0, 1))),
}


@pytest.mark.parametrize("case", TABLE, ids=list(TABLE))
def test_the_table(case: str) -> None:
    target, kept, demand, expected = TABLE[case]
    assert size(SPEC, target, kept, demand, NOW) == expected


#: How many are declared, at least and at most, the target, what there is to do, and what follows for a
#: cluster that was woken.
AWAKE_TABLE: dict[str, tuple[int, int, int, Demand | None, Sizing]] = {
    "it keeps its machine": (0, 8, 1, jobs(0), Sizing(1)),
    "it gets more as ever": (0, 8, 1, jobs(2), many(2, f"2 {IDLE}")),
    "others may go": (0, 8, 3, jobs(0), Sizing(3, slack(0, 1))),
    "an operator put it back to sleep": (0, 8, 0, jobs(0), Sizing(0)),
    "it may have none by now": (0, 0, 1, jobs(0), Sizing(1, slack(0, 0))),
    "nobody can tell": (0, 8, 1, None, Sizing(1)),
}


@pytest.mark.parametrize("case", AWAKE_TABLE, ids=list(AWAKE_TABLE))
def test_who_was_woken(case: str) -> None:
    least, most, target, demand, expected = AWAKE_TABLE[case]
    spec = SPEC.model_copy(update={"size": Size(min=least, max=most)})
    assert size(spec, target, None, demand, NOW, awake=True) == expected


@pytest.mark.parametrize(
    ("ago", "demand", "still"),
    [
        (AWAKE / 2, jobs(0), True),
        (AWAKE / 2, None, True),
        (AWAKE / 2, jobs(1), False),
        (AWAKE / 2, jobs(0, busy=1), False),
        (AWAKE, jobs(0), False),
        (AWAKE, None, False),
    ],
)
def test_it_is_kept_awake_until_there_is_demand_or_time_is_over(
    ago: timedelta, demand: Demand | None, still: bool
) -> None:
    assert held(NOW - ago, demand, NOW) == (NOW - ago if still else None)
    assert held(None, demand, NOW) is None


@pytest.mark.parametrize(
    ("declared", "target", "expected"),
    [
        (Size(min=0, max=1), 0, True),
        (Size(min=0, max=1), 1, False),
        (Size(min=0, max=0), 0, False),
        (Size(min=0, max=0), 1, False),
        (0, 0, False),
        (2, 2, False),
    ],
)
def test_who_sleeps(declared: int | Size, target: int, expected: bool) -> None:
    assert wakes(SPEC.model_copy(update={"size": declared}), target) is expected
