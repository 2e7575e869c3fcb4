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
WAKE_DURATION: Final = timedelta(minutes=15)


@dataclass(frozen=True)
class Demand:
    """The demand for one cluster's VMs.

    jobs: idle ones that only this cluster can run; vms: how many VMs they would fill.
    busy: VMs that run jobs now.
    """

    jobs: int = 0
    vms: int = 0
    busy: int = 0


@dataclass(frozen=True)
class ScaleDownDelay:
    """A pending scale-down: since when, and the most VMs that were wanted since then."""

    since: datetime
    most: int


class SizeDecision(NamedTuple):
    """The target size, the pending scale-down, and the reason if the target changed."""

    target: int
    scale_down_delay: ScaleDownDelay | None = None
    why: str = ""


def can_wake(spec: ClusterSpec, target: int) -> bool:
    """Whether a cluster can be woken: it has no VMs, but may have some."""
    return target == 0 and spec.range.max > 0


def still_woken(woken: datetime | None, demand: Demand | None, present: datetime) -> datetime | None:
    """Return when the cluster was woken, or None once that no longer justifies its VM."""
    seen = demand is not None and demand.busy + demand.vms > 0
    return None if woken is None or seen or present - woken >= WAKE_DURATION else woken


def decide_size(
    spec: ClusterSpec,
    target: int,
    scale_down_delay: ScaleDownDelay | None,
    demand: Demand | None,
    present: datetime,
    *,
    is_awake: bool = False,
) -> SizeDecision:
    """Return the wanted size of a cluster.

    target, scale_down_delay: the previous ones. demand: None: unknown now, so nothing changes.
    is_awake: keep the last VM of a woken cluster, see :func:`still_woken`.
    """
    if demand is None:
        return SizeDecision(target)
    least = max(spec.range.min, min(target, 1) if is_awake else 0)
    wanted = min(max(demand.busy + demand.vms, least), spec.range.max)
    if wanted > target:
        return SizeDecision(wanted, None, _growth_reason(wanted, demand))
    if wanted == target:
        return SizeDecision(target)
    scale_down_delay = scale_down_delay or ScaleDownDelay(present, wanted)
    most = max(scale_down_delay.most, wanted)
    if present - scale_down_delay.since < timedelta(seconds=spec.idle_seconds):
        return SizeDecision(target, ScaleDownDelay(scale_down_delay.since, most))
    if most >= target:  # an operator has made it smaller meanwhile
        return SizeDecision(target, ScaleDownDelay(present, wanted))
    left = ScaleDownDelay(present, wanted) if wanted < most else None
    return SizeDecision(
        most, left, f"{_count_text(most)}: no more were needed for {spec.idle_seconds} s"
    )


def _growth_reason(wanted: int, demand: Demand) -> str:
    if not demand.jobs:
        return f"{_count_text(wanted)}: {demand.busy} run jobs, and the declared minimum is kept"
    jobs = "1 idle job" if demand.jobs == 1 else f"{demand.jobs} idle jobs"
    busy = f"; {demand.busy} run jobs already" if demand.busy else ""
    return f"{_count_text(wanted)}: {jobs} that only this cluster can run{busy}"


def _count_text(vms: int) -> str:
    return "1 VM" if vms == 1 else f"{vms} VMs"
