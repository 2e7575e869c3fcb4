"""Autoscaler: computes the size of a cluster from the demand of jobs. No I/O.

A cluster grows at once. It shrinks to the largest size that was wanted within the last
``idle_seconds``, so that a VM ends only if it was surplus all that time.

An operator may know of jobs that the service does not count, and wake an empty cluster: it gets one
VM, and keeps it until there is demand, or until it had enough time to start and get a job.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from vmjobs.cluster.spec import ClusterSpec

#: A woken cluster keeps its VM so long without demand: time to fetch the image, boot, join the pool
#: and get a job.
AWAKE: Final = timedelta(minutes=15)


@dataclass(frozen=True)
class Demand:
    """The demand for one cluster's VMs.

    jobs: idle ones that only this cluster can run; machines: how many VMs they would fill.
    busy: VMs that run jobs now.
    """

    jobs: int = 0
    machines: int = 0
    busy: int = 0


@dataclass(frozen=True)
class Slack:
    """A pending scale-down: since when, and the most VMs that were wanted since then."""

    since: datetime
    most: int


class Sizing(NamedTuple):
    """The target size, the pending scale-down, and the reason if the target changed."""

    target: int
    slack: Slack | None = None
    why: str = ""


def wakes(spec: ClusterSpec, target: int) -> bool:
    """Whether a cluster can be woken: it has no VMs, but may have some."""
    return target == 0 and spec.range.max > 0


def held(woken: datetime | None, demand: Demand | None, present: datetime) -> datetime | None:
    """Return when the cluster was woken, or None once that no longer justifies its VM."""
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
    """Return the wanted size of a cluster.

    target, scale_down_delay: the previous ones. demand: None: unknown now, so nothing changes.
    is_awake: keep the last VM of a woken cluster, see :func:`still_woken`.
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
        return f"{_counted(wanted)}: {demand.busy} run jobs, and the declared minimum is kept"
    jobs = "1 idle job" if demand.jobs == 1 else f"{demand.jobs} idle jobs"
    busy = f"; {demand.busy} run jobs already" if demand.busy else ""
    return f"{_counted(wanted)}: {jobs} that only this cluster can run{busy}"


def _counted(machines: int) -> str:
    return "1 machine" if machines == 1 else f"{machines} machines"
