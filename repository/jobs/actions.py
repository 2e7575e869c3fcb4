"""Cancels, holds and releases jobs for their owners."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import and_, select, update

from repository.db.database import Database
from repository.db.models import JobRow
from repository.jobs.queries import find_job
from repository.jobs.selection import load_states, select_jobs
from repository.jobs.transitions import move_all
from repository.jobs.views import PublishJobs, job_views
from vmjobs.errors import Conflict, Unavailable
from vmjobs.job_sets import JobSelection, JobStatus
from vmjobs.model import Job, JobAction, JobState, Reason, ReasonCode, reason

logger = logging.getLogger(__name__)

#: Old state, new state and reason for each action on jobs that no scheduler has.
_OWNER_ACTIONS: Final[Mapping[JobAction, tuple[JobState, JobState, Reason]]] = {
    JobAction.CANCEL: (
        JobState.CANCELING,
        JobState.CANCELED,
        reason(ReasonCode.USER_CANCELED, "canceled by its owner"),
    ),
    JobAction.HOLD: (
        JobState.QUEUED,
        JobState.HELD,
        reason(ReasonCode.USER_HELD, "held by its owner"),
    ),
    JobAction.RELEASE: (
        JobState.HELD,
        JobState.QUEUED,
        reason(ReasonCode.RELEASED, "released by its owner"),
    ),
}


@dataclass(frozen=True)
class JobActions:
    """Cancels, holds and releases jobs. ``owner=None`` means any owner."""

    database: Database

    def cancel(self, job_id: str, owner: str | None = None, publish: PublishJobs | None = None) -> Job:
        """Cancel a job, as :meth:`change`; repeating the call is no error.

        Raises NotFound; Conflict for a job that has ended by itself.
        """
        with self.database.read() as session:
            find_job(session, job_id, owner)  # refuse ids of arrays
        self.change(JobAction.CANCEL, JobSelection(jobs=(job_id,)), owner, publish)
        with self.database.read() as session:
            (job,) = job_views(session, [find_job(session, job_id, owner)])
        if job.state.final and job.state is not JobState.CANCELED:
            raise Conflict(f"the job is {job.state} already: there is nothing to cancel")
        return job

    def change(
        self,
        action: JobAction,
        selection: JobSelection,
        owner: str | None = None,
        publish: PublishJobs | None = None,
    ) -> list[JobStatus]:
        """Cancel, hold or release jobs; return the state of each job now.

        Jobs whose state does not allow the action stay unchanged. A canceled job is CANCELING at once;
        further changes of submitted jobs follow from the scheduler. ``publish`` is called for them
        after the commit; if it fails, the worker's sweep finds the canceled jobs.

        Raises:
            NotFound: one of them does not exist; then nothing is done.
            AmbiguousId: several ids begin with one of them.
            InvalidRequest: more than ``MAX_SELECTED_JOBS`` jobs.
            Unavailable: what ``publish`` raises, when jobs are held or released.
        """
        before, after, why = _OWNER_ACTIONS[action]
        nowhere = and_(JobRow.dispatched.is_(None), JobRow.attempt == "")
        with self.database.write() as session:
            ids = select_jobs(session, selection, owner)
            if action is JobAction.CANCEL:
                move_all(session, ids, before, why)
            chosen = and_(JobRow.id.in_(ids), JobRow.state == before.value)
            never = session.scalars(select(JobRow.id).where(chosen, nowhere)).all()
            changed = JobRow.id.in_(move_all(session, never, after, why))
            session.execute(update(JobRow).where(changed).values(settled=after.final))
            found = load_states(session, ids)
        live = [job.id for job in found if not job.state.final]
        if publish is not None and live:
            try:
                publish(action, live)
            except Unavailable as error:
                if action is not JobAction.CANCEL:
                    raise
                logger.warning("canceling waits for the next sweep: %s", error.message)
        return found
