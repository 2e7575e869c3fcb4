"""Query HTCondor's daemons about one job, for :mod:`condor.diagnose.explainer`.

Part of :mod:`condor.daemon_call`: it imports nothing from vmjobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import classad2

from condor import names
from condor.diagnose.slot_analysis import BINDING_ERRORS, analyse, evaluate, format_value, number

#: Limits: jobs of a cluster that are queried, slots that are compared with a job.
MAX_JOBS, MAX_SLOTS = 10_000, 20_000
#: Limits in characters: of a job ad that is analysed, and of a value that is returned.
MAX_AD_LENGTH, MAX_TEXT_LENGTH = 1_000_000, 2000
#: The job attributes that are evaluated and returned.
RETURNED_ATTRIBUTES: Final = (
    names.CLUSTER_ID,
    names.PROC_ID,
    names.GLOBAL_ID,
    names.JOB_STATUS,
    names.JOB_ID,
    names.WANTED_IMAGE,
    names.WANTED_HYPERVISOR,
    names.POLICY,
    names.MAX_STARTS,
    names.MANAGED,
    names.ROUTED_TO,
    names.VM_STATE,
    names.VM_NODE,
    names.VM_REASON,
    names.VM_OUTCOME,
    names.VM_TRIED,
    names.WAITS,
    names.HOLD_REASON,
    names.HOLD_CODE,
    names.HOLD_SUBCODE,
    names.REMOVE_REASON,
    names.GRID_RESOURCE,
    names.GRID_JOB_ID,
    names.EXIT_CODE,
    names.EXIT_SIGNAL,
    names.EXIT_BY_SIGNAL,
    "JobUniverse",
    "GridResourceUnavailableTime",
    "ShouldTransferFiles",
    "WantContainer",
    "WantDocker",
    "RequestCpus",
    "RequestMemory",
    "RequestDisk",
    "RequestGPUs",
    "RemoteHost",
    "NumJobStarts",
    names.VM_VACATED,
    "EnteredCurrentStatus",
    "LastMatchTime",
    "LastRejMatchTime",
    "LastRejMatchReason",
    "ServerTime",
)
#: Order of preference for the jobs of a cluster, by ``JobStatus``: idle, held, suspended, running,
#: transferring, removed, completed.
_PREFERRED_STATUS: Final = (1, 5, 7, 2, 6, 3, 4)
#: Slots as a negotiator sees them. (The service's ad of revoked tokens is among the machine ads.)
_SLOTS: Final = f"DynamicSlot =!= true && {names.REVOKED} =?= undefined"
_NEGOTIATOR: Final = ("Name", "LastNegotiationCycleEnd0")
_SCHEDD: Final = ("MaxJobsRunning", "TotalRunningJobs")
_GROUP: Final = ("Name", "EffectiveQuota", "WeightedResourcesUsed")


def find(schedd: Any, cluster: int, proc: int | None) -> dict[str, Any]:
    """One job of a schedd; of a cluster, the first by order of preference (idle jobs first).

    ``ad``: its text, ``""`` if it is longer than :data:`MAX_AD_LENGTH`; ``attributes``: those of
    :data:`RETURNED_ATTRIBUTES` that it has; ``queued``: whether it is in the queue and not in the
    history; ``jobs``: number of the cluster's jobs in the queue, by ``JobStatus``. All are empty if
    there is no such job.
    """
    wanted = f"{names.CLUSTER_ID} == {int(cluster)}"
    if proc is not None:
        wanted += f" && {names.PROC_ID} == {int(proc)}"
    # (A smaller `limit` would not help: the newest jobs come last.)
    status = [names.CLUSTER_ID, names.PROC_ID, names.JOB_STATUS]
    ads = list(schedd.query(wanted, status, limit=MAX_JOBS))
    counted = Counter(str(ad.get(names.JOB_STATUS)) for ad in ads)
    if ads:
        first = min(ads, key=_preference)
        wanted = (
            f"{names.CLUSTER_ID} == {int(cluster)} && {names.PROC_ID} == {int(first[names.PROC_ID])}"
        )
        ads = list(schedd.query(wanted, [], limit=1))
    queued = bool(ads)
    if not ads:
        ads = list(schedd.history(wanted, [], 1))
    if not ads:
        return {"ad": "", "attributes": {}, "queued": False, "jobs": {}}
    text = str(ads[0])
    return {
        "ad": text if len(text) <= MAX_AD_LENGTH else "",
        "attributes": evaluate_attributes(ads[0], RETURNED_ATTRIBUTES),
        "queued": queued,
        "jobs": dict(counted),
    }


def _preference(ad: Any) -> tuple[int, int]:
    status = ad.get(names.JOB_STATUS)
    return (
        _PREFERRED_STATUS.index(status) if status in _PREFERRED_STATUS else len(_PREFERRED_STATUS),
        ad.get(names.PROC_ID, 0),
    )


def evaluate_attributes(ad: Any, wanted: Iterable[str]) -> dict[str, Any]:
    """The values of an ad's attributes that are numbers, booleans or strings (on one line)."""
    found: dict[str, Any] = {}
    for name in wanted:
        value = evaluate(name, ad) if name in ad else None
        if isinstance(value, str):
            found[name] = format_value(value, MAX_TEXT_LENGTH)
        elif isinstance(value, bool) or (value is not None and number(ad, name) is not None):
            found[name] = value
    return found


def explain(bindings: Any, collector: Any, text: str) -> dict[str, Any]:
    """Compare a pool's nodes with a job, and read limits of the pool that apply to the job.

    text: the job's ad.

    Adds to the result of :func:`condor.diagnose.slot_analysis.analyse`: ``negotiator``, ``schedd``,
    ``group``: attributes of their ads; ``problems``: queries that failed.

    Raises:
        ValueError: ``text`` is no ad.
    """
    try:
        job = classad2.ClassAd(text)
    except BINDING_ERRORS as error:
        raise ValueError("the job's ad cannot be parsed") from error
    # All attributes: only the ads themselves show which ones their expressions refer to.
    slots = collector.query(bindings.AdType.Startd, _SLOTS)
    answer = {**analyse(job, slots[:MAX_SLOTS]), "problems": []}
    kinds = {
        "negotiator": (bindings.AdType.Negotiator, "true", _NEGOTIATOR),
        "schedd": (bindings.AdType.Schedd, _of_schedd(job), _SCHEDD),
        "group": (bindings.AdType.Accounting, _of_group(job), _GROUP),
    }
    own = getattr(bindings, "HTCondorException", None)
    failures: tuple[type[Exception], ...] = BINDING_ERRORS + ((own,) if isinstance(own, type) else ())
    for name, (kind, constraint, wanted) in kinds.items():
        answer[name] = {}
        try:
            found = collector.query(kind, constraint, list(wanted)) if constraint else []
        except failures as error:
            answer["problems"].append(f"{name}: {format_value(error, MAX_TEXT_LENGTH)}")
        else:
            answer[name] = evaluate_attributes(found[0], wanted) if found else {}
    return answer


def _of_schedd(job: Mapping[str, Any]) -> str:
    schedd, sharp, _ = str(job.get(names.GLOBAL_ID, "")).partition("#")
    return f"Name =?= {_quoted(schedd)}" if sharp else ""


def _of_group(job: Mapping[str, Any]) -> str:
    group = job.get("AcctGroup")
    if not isinstance(group, str) or not group:
        return ""
    return f"IsAccountingGroup =?= true && Name =?= {_quoted(group)}"


def _quoted(text: str) -> str:
    return str(classad2.quote(text))
