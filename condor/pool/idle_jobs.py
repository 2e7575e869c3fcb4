"""Count the idle jobs that VMs which do not run yet could take.

Part of :mod:`condor.daemon_call`: it does a negotiator's work, and imports nothing from vmjobs. Jobs
that a schedd puts into one autocluster match the same slots: one of them is tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

#: Limits: schedds that are asked; jobs counted at each; groups of jobs that are matched at each.
MAX_SCHEDDS, MAX_JOBS, MAX_GROUPS = 50, 10000, 200
#: Idle, of the vanilla universe (as containers are), and no probe job.
_IDLE: Final = "JobStatus == 1 && JobUniverse == 5 && VMJobsProbe =?= undefined"
_ID: Final = ["ClusterId", "ProcId", "AutoClusterId"]
_SCHEDD: Final = ["Name", "Machine", "MyAddress", "AddressV1", "CondorVersion", "CondorPlatform"]
#: Resources of a partitionable slot: free as ``NAME``, in total as ``TotalSlotNAME``.
_RESOURCES: Final = ("Cpus", "Memory", "Disk")


class JobGroup(NamedTuple):
    """Equivalent jobs: one of them, and their number."""

    job: Any
    jobs: int


class ClusterAd(NamedTuple):
    """A cluster, and the machine ad of one of its VMs."""

    cluster: str
    ad: Any


def schedds(bindings: Any, collector: Any, named: str) -> list[Any]:
    """Ads of schedds that may have idle jobs; the named one always, and first."""
    kind = bindings.AdType.Schedd
    found = collector.query(kind, "TotalIdleJobs > 0", _SCHEDD)[:MAX_SCHEDDS]
    if named:
        found = [ad for ad in found if ad.get("Name") != named]
        found.insert(0, collector.locate(bindings.DaemonType.Schedd, named))
    return list(found)


def idle_job_groups(schedd: Any) -> Iterator[JobGroup]:
    alike: dict[Any, list[Any]] = {}
    for ad in schedd.query(_IDLE, _ID, limit=MAX_JOBS):
        job = (ad["ClusterId"], ad["ProcId"])
        known = ad.get("AutoClusterId")
        # The schedd has not put this job into an autocluster yet: it is a group of its own.
        alike.setdefault(known if type(known) is int else job, []).append(job)
    one_each = {jobs[0]: len(jobs) for jobs in list(alike.values())[:MAX_GROUPS]}
    if not one_each:
        return
    those = " || ".join(f"(ClusterId == {cluster} && ProcId == {proc})" for cluster, proc in one_each)
    for ad in schedd.query(those, []):
        yield JobGroup(ad, one_each[ad["ClusterId"], ad["ProcId"]])


def with_full_capacity(slot: Any) -> Any:
    """Change a slot's ad as if no job ran there, since it can run others later; return it."""
    for name in _RESOURCES:
        if slot.get("PartitionableSlot") is True and f"TotalSlot{name}" in slot:
            slot[name] = slot[f"TotalSlot{name}"]
    return slot


def count_idle_jobs(
    groups: Iterable[JobGroup], kinds: Sequence[ClusterAd], slots: Sequence[Any]
) -> dict[str, dict[str, int]]:
    """For each cluster, the number of jobs that only it can run, and of VMs that they fill."""
    jobs = dict.fromkeys((kind.cluster for kind in kinds), 0)
    filled = dict.fromkeys(jobs, 0.0)
    for group in groups:
        able = {kind.cluster: kind.ad for kind in kinds if kind.ad.symmetricMatch(group.job)}
        cluster = _responsible_cluster(group.job, able, slots)
        if cluster is not None:
            jobs[cluster] += group.jobs
            filled[cluster] += group.jobs / _jobs_per_vm(group.job, able[cluster])
    return {c: {"jobs": jobs[c], "vms": math.ceil(filled[c] - 1e-6)} for c in jobs}


def _responsible_cluster(job: Any, able: Mapping[str, Any], slots: Sequence[Any]) -> str | None:
    """The cluster that must run a job; None if another slot of the pool can run it."""
    if not able:
        return None
    present = set()
    for slot in slots:
        if slot.symmetricMatch(job):
            cluster = slot.get("VMJobsCluster")
            if cluster not in able:
                return None
            present.add(cluster)
    return next((cluster for cluster in able if cluster in present), next(iter(able)))


def _jobs_per_vm(job: Any, vm: Any) -> int:
    """How many such jobs one VM runs at a time."""
    fit = []
    for name in _RESOURCES:
        asked = job.eval(f"Request{name}") if f"Request{name}" in job else 0
        if isinstance(asked, int | float) and asked >= 1:
            fit.append(int(vm.eval(name) // asked))
    return max(1, min(fit, default=1))
