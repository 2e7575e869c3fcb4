"""The worker's operations: submit jobs to the scheduler, remove them, and track them.

Every function may be repeated, run twice at once, or be cut short by ``kill -9`` at any point: the
next call, or the sweep, continues from the database.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final, Protocol

from repository.clusters.pools import Pool
from repository.service import Repository
from vmjobs.batch import BatchJob, Observation
from vmjobs.errors import ConfigError, InvalidRequest, Unavailable, VMJobsError
from vmjobs.model import MAX_ARRAY, ON_NODE_STATES, CondorRef, JobAction, JobState
from vmjobs.model import now as utc_now

logger = logging.getLogger(__name__)

#: Issues a token for one job, from job id, owner and lifetime in seconds.
IssueToken = Callable[[str, str, int], str]

#: A job's token is valid for the run time of the job, and this long in queues before (seconds).
QUEUE_SECONDS: Final = 7 * 86400
#: Jobs submitted in one transaction at most, which blocks the schedd for a part of a second. Beside
#: the largest array there is space for small ones.
MAX_SUBMIT_JOBS: Final = MAX_ARRAY * 5 // 4
#: States in which a job can be held, and released.
CHANGEABLE_STATES: Final[Mapping[JobAction, frozenset[JobState]]] = {
    JobAction.HOLD: ON_NODE_STATES | {JobState.QUEUED, JobState.PREEMPTED},
    JobAction.RELEASE: frozenset({JobState.HELD}),
}
#: Jobs that were canceled this long ago and are still at the scheduler are removed there.
REMOVE_CANCELED_AFTER: Final = timedelta(seconds=60)
#: The same for jobs that ended by themselves. Until then a scheduler that has missed the end may run
#: them once more: on the node they end again at once, and so also at the scheduler.
REMOVE_ENDED_AFTER: Final = timedelta(minutes=10)


class Scheduler(Protocol):
    """A batch system. Every method raises ``Unavailable("schedd", …)``."""

    def submit(self, jobs: Sequence[BatchJob]) -> dict[str, CondorRef]:
        """Queue jobs of any arrays in one transaction; jobs that are queued already are found.

        Raises:
            ConfigError, InvalidRequest: one of the jobs is not acceptable; none is queued.
        """

    def act(self, action: JobAction, refs: Sequence[CondorRef], why: str) -> None:
        """Perform an action on jobs, also at remote schedds; ignores unknown jobs."""

    def watch(self, arrays: Sequence[str]) -> list[Observation]:
        """The latest states from the event logs of these arrays; does not query the schedd."""

    def query(self, job_ids: Sequence[str]) -> list[Observation]:
        """Query the schedd (queue, then history); one observation for each id."""

    def forget(self, array: str) -> None:
        """Remove the spool directory of an array whose jobs are all final."""


@dataclass(frozen=True)
class DispatchContext:
    """The collaborators of the functions in this module.

    pools: the pools that virtual clusters may join, by name.
    """

    repository: Repository
    scheduler: Scheduler
    issue_token: IssueToken
    pools: Mapping[str, Pool] = field(default_factory=dict)


def submit_array(parts: DispatchContext, array: str) -> None:
    """Submit the array's pending jobs to the scheduler, with all other pending jobs.

    Raises NotFound if the submission is not committed (yet), Unavailable.
    """
    parts.repository.condor_sync.require_array(array)
    submit_waiting(parts)


def submit_waiting(parts: DispatchContext) -> None:
    """Submit all pending jobs to the scheduler, several arrays together; owners take turns.

    Raises Unavailable.
    """
    deferred: set[str] = set()
    while parts.repository.condor_sync.has_pending_jobs(deferred):
        with parts.repository.database.exclusive("submitting") as alone:
            if not alone:
                return  # another process submits now, and looks again when it has finished
            while ready := parts.repository.condor_sync.begin_dispatch(MAX_SUBMIT_JOBS, deferred):
                _submit(parts, ready, deferred)


def _submit(parts: DispatchContext, ready: Sequence[BatchJob], deferred: set[str]) -> None:
    """Submit jobs; if the scheduler refuses them, find the array that it refuses and defer it."""
    sync, arrays = parts.repository.condor_sync, list(dict.fromkeys(job.array for job in ready))
    try:
        refs = parts.scheduler.submit([_with_token(parts, job) for job in ready])
    except Unavailable as error:
        sync.note_unavailable(arrays, error.message)
        raise
    except (ConfigError, InvalidRequest) as error:
        if len(arrays) > 1:
            half = set(arrays[: len(arrays) // 2])
            _submit(parts, [job for job in ready if job.array in half], deferred)
            _submit(parts, [job for job in ready if job.array not in half], deferred)
            return
        deferred |= set(arrays)
        if isinstance(error, ConfigError):
            sync.note_unavailable(arrays, error.message)
            logger.error("array %s waits until the settings are fixed: %s", arrays[0], error.message)
        else:
            sync.refuse(arrays[0], error.message)
            logger.warning("array %s cannot be submitted: %s", arrays[0], error.message)
        return
    unwanted = [job.ref for job in sync.record_condor(refs) if job.ref is not None]
    if unwanted:
        parts.scheduler.act(JobAction.CANCEL, unwanted, "canceled while it was being submitted")


def _with_token(parts: DispatchContext, job: BatchJob) -> BatchJob:
    return replace(
        job, token=parts.issue_token(job.id, job.owner, job.spec.run_seconds + QUEUE_SECONDS)
    )


def change_jobs(parts: DispatchContext, action: JobAction, ids: Sequence[str]) -> None:
    """Cancel, hold or release jobs at the scheduler, by one call.

    Raises Unavailable.
    """
    if action is JobAction.CANCEL:
        cancel_jobs(parts, ids)
        return
    if refs := parts.repository.condor_sync.placed(ids, CHANGEABLE_STATES[action]):
        parts.scheduler.act(action, refs, f"{action} by the job's owner")
    submit_waiting(parts)  # jobs that were held before they were submitted


def cancel_jobs(parts: DispatchContext, ids: Sequence[str]) -> None:
    """Remove canceled or finished jobs from the scheduler, all together.

    Raises Unavailable.
    """
    sync = parts.repository.condor_sync
    left = sync.jobs_to_remove(ids)
    if unplaced := [job.id for job in left if job.ref is None]:
        with parts.repository.database.exclusive("submitting") as alone:
            if alone:  # otherwise the submitting process, or the sweep, finds them canceled
                sync.observe(parts.scheduler.query(unplaced))
                left = sync.jobs_to_remove(ids)
    refs: dict[str, list[CondorRef]] = {}
    for job in left:
        if job.ref is not None:
            refs.setdefault(job.why, []).append(job.ref)
    for why, placed in refs.items():
        parts.scheduler.act(JobAction.CANCEL, placed, why)


def track(parts: DispatchContext) -> None:
    """Read the event logs, which costs the schedd nothing."""
    arrays = parts.repository.condor_sync.active_arrays()
    if arrays:
        parts.repository.condor_sync.observe(parts.scheduler.watch(arrays))
    parts.repository.condor_sync.observe_waiting()


def reconcile(parts: DispatchContext) -> None:
    """Query the schedd once for all jobs that are not final."""
    if ids := parts.repository.condor_sync.at_scheduler():
        asked = utc_now()
        parts.repository.condor_sync.observe(parts.scheduler.query(ids), asked)


def sweep(parts: DispatchContext) -> None:
    """Handle leftovers: pending jobs, jobs to remove, spool directories, temporary files."""
    sync = parts.repository.condor_sync
    try:
        parts.repository.blobs.clean()
    except VMJobsError as error:  # an unavailable storage must not keep jobs waiting
        logger.warning("cannot remove leftovers of killed writers now: %s", error.message)
    submit_waiting(parts)
    left = sync.overdue_removals(REMOVE_CANCELED_AFTER, REMOVE_ENDED_AFTER)
    if left:
        asked = utc_now()
        placed = [job.id for job in sync.jobs_to_remove(left) if job.ref]
        sync.observe(parts.scheduler.query(placed), asked)
        cancel_jobs(parts, left)
    for array in sync.finished_arrays():
        parts.scheduler.forget(array)
        sync.mark_forgotten(array)
