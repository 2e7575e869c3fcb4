"""How many machines a cluster is to have: the table of ``vmjobs.cluster.demand``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from vmjobs.cluster.demand import Demand, Sizing, Slack, size
from vmjobs.cluster.spec import ClusterSpec

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SPEC = ClusterSpec.model_validate(
    {"name": "vc", "image": "worker", "size": {"min": 1, "max": 8}, "idle_seconds": 100}
)


def slack(seconds: float, most: int) -> Slack:
    return Slack(NOW - timedelta(seconds=seconds), most)


def jobs(count: int, busy: int = 0) -> Demand:
    return Demand(count, count, busy)


#: The target, what was remembered, what there is to do, and what follows.
TABLE: dict[str, tuple[int, Slack | None, Demand | None, Sizing]] = {
    "as many as are needed": (3, None, jobs(1, busy=2), Sizing(3)),
    "more at once": (
        1,
        None,
        jobs(3),
        Sizing(3, None, "3 machines: 3 idle jobs that only this cluster can run"),
    ),
    "beside those that run jobs": (
        2,
        None,
        jobs(1, busy=2),
        Sizing(3, None, "3 machines: 1 idle job that only this cluster can run; 2 run jobs already"),
    ),
    "several jobs in one machine": (
        1,
        None,
        Demand(jobs=7, machines=2),
        Sizing(2, None, "2 machines: 7 idle jobs that only this cluster can run"),
    ),
    "never more than max": (
        7,
        None,
        jobs(100),
        Sizing(8, None, "8 machines: 100 idle jobs that only this cluster can run"),
    ),
    "at max it stays": (8, None, jobs(100), Sizing(8)),
    "never fewer than min": (1, None, jobs(0), Sizing(1)),
    "a higher min": (
        0,
        None,
        jobs(0),
        Sizing(1, None, "1 machine: 0 run jobs, and no fewer are declared"),
    ),
    "fewer with patience": (5, None, jobs(2), Sizing(5, slack(0, 2))),
    "it waits": (5, slack(99, 2), jobs(2), Sizing(5, slack(99, 2))),
    "most of what was needed meanwhile": (5, slack(50, 2), jobs(4), Sizing(5, slack(50, 4))),
    "not the least": (5, slack(50, 4), jobs(2), Sizing(5, slack(50, 4))),
    "then those that nobody needed go": (
        5,
        slack(100, 2),
        jobs(1),
        Sizing(2, slack(0, 1), "2 machines: no more were needed for 100 s"),
    ),
    "down to min": (
        5,
        slack(100, 1),
        jobs(0),
        Sizing(1, None, "1 machine: no more were needed for 100 s"),
    ),
    "demand that is back ends the wait": (5, slack(99, 2), jobs(5), Sizing(5)),
    "or makes it grow": (
        5,
        slack(99, 2),
        jobs(6),
        Sizing(6, None, "6 machines: 6 idle jobs that only this cluster can run"),
    ),
    "machines that run jobs are needed": (5, slack(100, 5), jobs(0, busy=4), Sizing(5, slack(0, 4))),
    "nobody can tell": (5, slack(1000, 1), None, Sizing(5)),
    "an operator made it smaller": (2, slack(100, 4), jobs(1), Sizing(2, slack(0, 1))),
}


@pytest.mark.parametrize("case", TABLE, ids=list(TABLE))
def test_the_table(case: str) -> None:
    target, kept, demand, expected = TABLE[case]
    assert size(SPEC, target, kept, demand, NOW) == expected
