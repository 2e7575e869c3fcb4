"""Turn a job ad from the queue or the history into an observation. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from condor import names
from vmjobs.batch import BatchStatus, Observation
from vmjobs.model import CondorRef

#: The attributes that are requested from a schedd.
PROJECTION: Final = (
    names.JOB_ID,
    names.CLUSTER_ID,
    names.PROC_ID,
    names.JOB_STATUS,
    names.HOLD_REASON,
    names.REMOVE_REASON,
    names.GRID_JOB_ID,
    names.EXIT_CODE,
    names.EXIT_SIGNAL,
    names.EXIT_BY_SIGNAL,
)

_STATUS: Final[Mapping[int, BatchStatus]] = {
    1: BatchStatus.IDLE,
    2: BatchStatus.RUNNING,
    3: BatchStatus.REMOVED,
    4: BatchStatus.COMPLETED,
    5: BatchStatus.HELD,
    6: BatchStatus.RUNNING,  # transferring output
    7: BatchStatus.SUSPENDED,
}


def observe(ad: Mapping[str, Any], schedd: str, *, in_queue: bool) -> Observation:
    """The observation for ``ad``.

    A removed job that is still in the queue counts as ``RUNNING``: the site has not yet confirmed
    its removal, and its VM may still run.
    """
    status = _STATUS.get(int(ad.get(names.JOB_STATUS, 0)), BatchStatus.REMOVED)
    reason = ""
    if status is BatchStatus.HELD:
        reason = str(ad.get(names.HOLD_REASON, ""))
    elif status is BatchStatus.REMOVED:
        reason = str(ad.get(names.REMOVE_REASON, ""))
        if in_queue:
            status = BatchStatus.RUNNING
            reason = f"being removed: {reason}"
    elif not in_queue and status is not BatchStatus.COMPLETED:
        status = BatchStatus.REMOVED
    code, signal = _exit(ad) if status is BatchStatus.COMPLETED else (None, None)
    ref = CondorRef(
        schedd=schedd,
        cluster=int(ad.get(names.CLUSTER_ID, 0)),
        proc=int(ad.get(names.PROC_ID, 0)),
        grid_job_id=str(ad.get(names.GRID_JOB_ID, "")),
    )
    return Observation(str(ad.get(names.JOB_ID, "")), status, ref, reason, code, signal)


def _exit(ad: Mapping[str, Any]) -> tuple[int | None, int | None]:
    by_signal = bool(ad.get(names.EXIT_BY_SIGNAL, False))
    value = ad.get(names.EXIT_SIGNAL if by_signal else names.EXIT_CODE)
    number = value if type(value) is int else None
    return (None, number) if by_signal else (number, None)
