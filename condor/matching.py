"""Which idle jobs could run on machines that are not there: the part of :mod:`condor.daemon_call`
that does a negotiator's work. It imports nothing of vmjobs.

Jobs that a schedd puts into one autocluster are alike to every machine: one of them is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

#: Schedds that are asked, jobs that are counted at each, kinds of jobs that are looked at there.
SCHEDDS, JOBS, GROUPS = 50, 10000, 200
#: Idle, of the vanilla universe (containers are), and no probe of ours.
_IDLE: Final = "JobStatus == 1 && JobUniverse == 5 && VMJobsProbe =?= undefined"
_ID: Final = ["ClusterId", "ProcId", "AutoClusterId"]
_SCHEDD: Final = ["Name", "Machine", "MyAddress", "AddressV1", "CondorVersion", "CondorPlatform"]
#: What a divided slot has left, and what it has in all.
_WHOLE: Final = ("Cpus", "Memory", "Disk")


class Group(NamedTuple):
    """Jobs that are alike: one of them, and how many there are."""

    job: Any
    jobs: int


class Kind(NamedTuple):
    """A cluster, and the ad of a machine of it."""

    cluster: str
    ad: Any


def schedds(bindings: Any, collector: Any, named: str) -> list[Any]:
    """Ads of schedds that may have idle jobs; the one that is named in any case, and first."""
    kind = bindings.AdType.Schedd
    found = collector.query(kind, "TotalIdleJobs > 0", _SCHEDD)[:SCHEDDS]
    if named:
        found = [ad for ad in found if ad.get("Name") != named]
        found.insert(0, collector.locate(bindings.DaemonType.Schedd, named))
    return list(found)


def idle_groups(schedd: Any) -> Iterator[Group]:
    """The idle jobs of a schedd."""
    alike: dict[Any, list[Any]] = {}
    for ad in schedd.query(_IDLE, _ID, limit=JOBS):
        job = (ad["ClusterId"], ad["ProcId"])
        known = ad.get("AutoClusterId")
        # Not yet looked at by the schedd: alike only to itself.
        alike.setdefault(known if type(known) is int else job, []).append(job)
    one_each = {jobs[0]: len(jobs) for jobs in list(alike.values())[:GROUPS]}
    if not one_each:
        return
    those = " || ".join(f"(ClusterId == {cluster} && ProcId == {proc})" for cluster, proc in one_each)
    for ad in schedd.query(those, []):
        yield Group(ad, one_each[ad["ClusterId"], ad["ProcId"]])


def whole(machine: Any) -> Any:
    """The ad of a machine as if no job ran there: it could run another one later."""
    for name in _WHOLE:
        if machine.get("PartitionableSlot") is True and f"TotalSlot{name}" in machine:
            machine[name] = machine[f"TotalSlot{name}"]
    return machine


def waiting(
    groups: Iterable[Group], kinds: Sequence[Kind], machines: Sequence[Any]
) -> dict[str, dict[str, int]]:
    """For each cluster jobs that only it could run, and how many machines those would fill."""
    jobs = dict.fromkeys((kind.cluster for kind in kinds), 0)
    filled = dict.fromkeys(jobs, 0.0)
    for group in groups:
        able = {kind.cluster: kind.ad for kind in kinds if kind.ad.symmetricMatch(group.job)}
        cluster = _whose(group.job, able, machines)
        if cluster is not None:
            jobs[cluster] += group.jobs
            filled[cluster] += group.jobs / _at_once(group.job, able[cluster])
    return {c: {"jobs": jobs[c], "machines": math.ceil(filled[c] - 1e-6)} for c in jobs}


def _whose(job: Any, able: Mapping[str, Any], machines: Sequence[Any]) -> str | None:
    """The cluster that a job is left to; None: somebody else can run it."""
    if not able:
        return None
    present = set()
    for machine in machines:
        if machine.symmetricMatch(job):
            cluster = machine.get("VMJobsCluster")
            if cluster not in able:
                return None
            present.add(cluster)
    return next((cluster for cluster in able if cluster in present), next(iter(able)))


def _at_once(job: Any, machine: Any) -> int:
    """How many such jobs the machine runs at a time."""
    fit = []
    for name in _WHOLE:
        asked = job.eval(f"Request{name}") if f"Request{name}" in job else 0
        if isinstance(asked, int | float) and asked >= 1:
            fit.append(int(machine.eval(name) // asked))
    return max(1, min(fit, default=1))
