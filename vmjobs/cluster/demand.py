"""How many machines a cluster of a range of sizes is to have: a pure function of what jobs demand.

It grows at once. It shrinks with patience: to the most that was wanted at any time within the last
``idle_seconds``, so that a machine goes only if it was one too many all that time.

Somebody may see jobs that nobody counts here, and wake a cluster that sleeps: it gets one machine, and
keeps it until there is demand, or until it had time enough to come up and get a job.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from vmjobs.cluster.spec import ClusterSpec

#: Who was woken keeps a machine that nobody seems to need: it fetches its image, boots and joins
#: meanwhile, and the pool gives it a job.
AWAKE: Final = timedelta(minutes=15)


@dataclass(frozen=True)
class Demand:
    """What there is to do for one cluster.

    jobs: idle ones that only this cluster can run; machines: so many they would fill, one by one.
    busy: machines that run jobs now.
    """

    jobs: int = 0
    machines: int = 0
    busy: int = 0


@dataclass(frozen=True)
class Slack:
    """Since when fewer machines are wanted than the target says, and how many at most since then."""

    since: datetime
    most: int


class Sizing(NamedTuple):
    """The target, what is to be remembered, and why the target is another than before."""

    target: int
    slack: Slack | None = None
    why: str = ""


def wakes(spec: ClusterSpec, target: int) -> bool:
    """Whether a cluster sleeps, and may have a machine."""
    return target == 0 and spec.range.max > 0


def held(woken: datetime | None, demand: Demand | None, present: datetime) -> datetime | None:
    """When the cluster was woken, if that is still what it has a machine for."""
    seen = demand is not None and demand.busy + demand.machines > 0
    return None if woken is None or seen or present - woken >= AWAKE else woken


def size(
    spec: ClusterSpec,
    target: int,
    slack: Slack | None,
    demand: Demand | None,
    present: datetime,
    *,
    awake: bool = False,
) -> Sizing:
    """The size that a cluster is to have now.

    target, slack: what they were. demand: None: nobody can tell now, and nothing is concluded.
    awake: a machine that it has is not the last one to go, see :func:`held`.
    """
    if demand is None:
        return Sizing(target)
    least = max(spec.range.min, min(target, 1) if awake else 0)
    wanted = min(max(demand.busy + demand.machines, least), spec.range.max)
    if wanted > target:
        return Sizing(wanted, None, _said(wanted, demand))
    if wanted == target:
        return Sizing(target)
    slack = slack or Slack(present, wanted)
    most = max(slack.most, wanted)
    if present - slack.since < timedelta(seconds=spec.idle_seconds):
        return Sizing(target, Slack(slack.since, most))
    if most >= target:  # an operator has made it smaller meanwhile
        return Sizing(target, Slack(present, wanted))
    left = Slack(present, wanted) if wanted < most else None
    return Sizing(most, left, f"{_counted(most)}: no more were needed for {spec.idle_seconds} s")


def _said(wanted: int, demand: Demand) -> str:
    if not demand.jobs:
        return f"{_counted(wanted)}: {demand.busy} run jobs, and no fewer are declared"
    jobs = "1 idle job" if demand.jobs == 1 else f"{demand.jobs} idle jobs"
    busy = f"; {demand.busy} run jobs already" if demand.busy else ""
    return f"{_counted(wanted)}: {jobs} that only this cluster can run{busy}"


def _counted(machines: int) -> str:
    return "1 machine" if machines == 1 else f"{machines} machines"
