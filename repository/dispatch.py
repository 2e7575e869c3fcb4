"""The worker's work: take jobs to the scheduler, take them back, and hear what became of them.

Every function may be repeated, run twice at once, or be cut short by ``kill -9`` at any point: the
next call, or the sweep, goes on from what is stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from repository.service import Repository
from vmjobs.errors import ConfigError, InvalidRequest, Unavailable, VMJobsError
from vmjobs.model import MAX_ARRAY, ON_NODE, CondorRef, JobAction, JobState
from vmjobs.model import now as utc_now
from vmjobs.ports import BatchJob, Pool, Scheduler

logger = logging.getLogger(__name__)

#: (job id, owner, seconds it is good for) -> a token for this job alone.
Mint = Callable[[str, str, int], str]

#: A job's token lives as long as the job may run, and this long in queues before (seconds).
QUEUE_SECONDS: Final = 7 * 86400
#: Jobs that go to the scheduler in one transaction, at most: for a part of a second it answers nobody.
#: Beside the largest array there is room for small ones.
TOGETHER: Final = MAX_ARRAY * 5 // 4
#: In which states a job can be held, and released.
CHANGEABLE: Final[Mapping[JobAction, frozenset[JobState]]] = {
    JobAction.HOLD: ON_NODE | {JobState.QUEUED, JobState.PREEMPTED},
    JobAction.RELEASE: frozenset({JobState.HELD}),
}
#: Jobs that were canceled this long ago and are still at the scheduler are removed there.
LEFT_OVER: Final = timedelta(seconds=60)
#: The same of jobs that ended by themselves. Until then it may run them once more, not having been
#: told of the end: on the node they end again at once, and so there too.
ENDED: Final = timedelta(minutes=10)


@dataclass(frozen=True)
class Dispatch:
    """What the functions here work with.

    clean: called by the sweep, to remove leftovers of killed processes.
    pools: that virtual clusters may join, by name.
    """

    repository: Repository
    scheduler: Scheduler
    mint: Mint
    clean: tuple[Callable[[], int], ...] = field(default=())
    pools: Mapping[str, Pool] = field(default_factory=dict)


def submit_array(parts: Dispatch, array: str) -> None:
    """Queue the array's waiting jobs at the scheduler, with all others that wait.

    Raises NotFound where the submission is not committed (yet), Unavailable.
    """
    parts.repository.require_array(array)
    submit_waiting(parts)


def submit_waiting(parts: Dispatch) -> None:
    """Queue all jobs that wait for it at the scheduler, some arrays together; owners take turns.

    Raises Unavailable.
    """
    put_off: set[str] = set()
    while parts.repository.waits(put_off):
        with parts.repository.database.exclusive("submitting") as alone:
            if not alone:
                return  # another process is at it, and looks once more when it has done
            while ready := parts.repository.begin_dispatch(TOGETHER, put_off):
                _submit(parts, ready, put_off)


def _submit(parts: Dispatch, ready: Sequence[BatchJob], put_off: set[str]) -> None:
    """Queue jobs, or find out of which array the scheduler takes none and put that off."""
    repository, arrays = parts.repository, list(dict.fromkeys(job.array for job in ready))
    try:
        refs = parts.scheduler.submit([_with_token(parts, job) for job in ready])
    except Unavailable as error:
        repository.note_unavailable(arrays, error.message)
        raise
    except (ConfigError, InvalidRequest) as error:
        if len(arrays) > 1:
            half = set(arrays[: len(arrays) // 2])
            _submit(parts, [job for job in ready if job.array in half], put_off)
            _submit(parts, [job for job in ready if job.array not in half], put_off)
            return
        put_off |= set(arrays)
        if isinstance(error, ConfigError):
            repository.note_unavailable(arrays, error.message)
            logger.error("array %s waits for better settings: %s", arrays[0], error.message)
        else:
            repository.refuse(arrays[0], error.message)
            logger.warning("array %s: the scheduler side refuses it: %s", arrays[0], error.message)
        return
    unwanted = [job.ref for job in repository.record_condor(refs) if job.ref is not None]
    if unwanted:
        parts.scheduler.act(JobAction.CANCEL, unwanted, "canceled while it was being submitted")


def _with_token(parts: Dispatch, job: BatchJob) -> BatchJob:
    return replace(job, token=parts.mint(job.id, job.owner, job.spec.run_seconds + QUEUE_SECONDS))


def change_jobs(parts: Dispatch, action: JobAction, ids: Sequence[str]) -> None:
    """Have the scheduler cancel, hold or release jobs, by one call.

    Raises Unavailable.
    """
    if action is JobAction.CANCEL:
        cancel_jobs(parts, ids)
        return
    if refs := parts.repository.placed(ids, CHANGEABLE[action]):
        parts.scheduler.act(action, refs, f"{action} by the job's owner")
    submit_waiting(parts)  # those that were held before they were submitted


def cancel_jobs(parts: Dispatch, ids: Sequence[str]) -> None:
    """Take canceled or finished jobs back from the scheduler, all together.

    Raises Unavailable.
    """
    repository = parts.repository
    left = repository.leftover(ids)
    if unplaced := [job.id for job in left if job.ref is None]:
        with repository.database.exclusive("submitting") as alone:
            if alone:  # or else who submits them finds them canceled, or the sweep does
                repository.observe(parts.scheduler.query(unplaced))
                left = repository.leftover(ids)
    refs: dict[str, list[CondorRef]] = {}
    for job in left:
        if job.ref is not None:
            refs.setdefault(job.why, []).append(job.ref)
    for why, placed in refs.items():
        parts.scheduler.act(JobAction.CANCEL, placed, why)


def track(parts: Dispatch) -> None:
    """Read the event logs; costs the schedd nothing."""
    arrays = parts.repository.active_arrays()
    if arrays:
        parts.repository.observe(parts.scheduler.watch(arrays))
    parts.repository.observe_waiting()


def reconcile(parts: Dispatch) -> None:
    """Ask the schedd once about all jobs that are not final."""
    if ids := parts.repository.at_scheduler():
        asked = utc_now()
        parts.repository.observe(parts.scheduler.query(ids), asked)


def sweep(parts: Dispatch) -> None:
    """Pick up what was left lying: undispatched jobs, unremoved ones, spools, half files."""
    repository = parts.repository
    for remove_leftovers in (repository.blobs.clean, *parts.clean):
        _clean(remove_leftovers)
    submit_waiting(parts)
    left = repository.leftovers(LEFT_OVER, ENDED)
    if left:
        asked = utc_now()
        placed = [job.id for job in repository.leftover(left) if job.ref]
        repository.observe(parts.scheduler.query(placed), asked)
        cancel_jobs(parts, left)
    for array in repository.finished_arrays():
        parts.scheduler.forget(array)
        repository.mark_forgotten(array)


def _clean(remove_leftovers: Callable[[], int]) -> None:
    """Remove left-overs; where storage is out of reach they can wait, and jobs cannot."""
    try:
        remove_leftovers()
    except VMJobsError as error:
        logger.warning("left-overs of killed writers stay for now: %s", error.message)


def collect(parts: Dispatch) -> None:
    """Remove images whose time is over, uploads that were given up, and bytes that nobody needs."""
    parts.repository.collect()


def clusters(parts: Dispatch) -> None:
    """Bring virtual clusters from what is there to what is wanted."""
    parts.repository.clusters.reconcile(parts.pools)
