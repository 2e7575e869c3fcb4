"""Transparent jobs: HTCondor's own jobs, of which only the last checkpoint is stored.

A node claims such a job for a run, like a job of the service; a newer claim fences off older ones.
The service does not learn when such a job is removed from its queue: its checkpoint is deleted once no
node has reported it for ``checkpoint_seconds``.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from repository.db.database import Database
from repository.db.models import CondorJobRow
from repository.db.sql import upsert
from repository.images.checkpoints import (
    checkpoint_of,
    delete_checkpoint,
    keep_checkpoint,
    record_resume_failure,
)
from vmjobs.config import Config
from vmjobs.errors import AttemptSuperseded, Forbidden, InvalidRequest, NotFound
from vmjobs.model import Checkpoint
from vmjobs.model import now as utc_now
from vmjobs.wire import CondorJobClaim

#: Prefix of the owners of transparent jobs; no user of the service has such a name.
OWNER_PREFIX = "condor:"


@dataclass(frozen=True)
class CondorJobs:
    """Transparent jobs, as agents claim and report them."""

    database: Database
    config: Config

    def claim(self, job: str, claim: CondorJobClaim) -> Checkpoint | None:
        """Claim the job for a run; return its checkpoint. Repeating the call is no error.

        Raises Forbidden: the job has another owner.
        """
        values = {
            "id": job,
            "owner": f"{OWNER_PREFIX}{claim.owner}",
            "attempt": claim.attempt,
            "heard": utc_now(),
        }
        with self.database.write() as session:
            row = upsert(
                session,
                CondorJobRow,
                values,
                key=("id",),
                change=("attempt", "heard"),
                returning=(CondorJobRow.owner,),
            )
            if row.owner != values["owner"]:
                raise Forbidden(f"job {job} belongs to another owner")
            return checkpoint_of(session, job)

    def exists(self, job: str) -> bool:
        """Whether a node has claimed the job and not ended it."""
        with self.database.read() as session:
            return session.get(CondorJobRow, job) is not None

    def keep_checkpoint(self, job: str, attempt: str, upload: str, checkpoint: Checkpoint) -> None:
        """Store a checkpoint, from which the next run resumes. Repeating the call is no error.

        Raises NotFound; AttemptSuperseded; InvalidRequest (the VM of another job, or no VM
        specification); and as :func:`keep_checkpoint`.
        """
        if checkpoint.making is None:
            raise InvalidRequest("the checkpoint has no VM specification")
        with self.database.write() as session:
            row = _lock_current(session, job, attempt)
            before = checkpoint_of(session, job)
            if before == checkpoint:
                return  # the answer to the first delivery was lost
            known = before.machine if before else ""
            if checkpoint.machine != known and checkpoint.machine.rpartition("-")[2] != attempt:
                raise InvalidRequest(f"the VM {checkpoint.machine} does not belong to job {job}")
            keep_checkpoint(session, self.config, job, row.owner, upload, checkpoint)
            row.heard = utc_now()

    def record_resume_failure(self, job: str, attempt: str) -> None:
        """Record that the run failed to resume from the checkpoint. Repeating it is no error.

        Raises NotFound, AttemptSuperseded.
        """
        with self.database.write() as session:
            row = _lock_current(session, job, attempt)
            if row.failed != attempt:
                row.failed = attempt
                record_resume_failure(session, job)

    def end(self, job: str, attempt: str) -> None:
        """Delete a job that is over, with its checkpoint.  Raises NotFound, AttemptSuperseded."""
        with self.database.write() as session:
            session.delete(_lock_current(session, job, attempt))
            delete_checkpoint(session, job)


def _lock_current(session: Session, job: str, attempt: str) -> CondorJobRow:
    """Return the job's row, locked until the transaction ends."""
    row = session.get(CondorJobRow, job, with_for_update=True)
    if row is None:
        raise NotFound(f"there is no job {job[:64]}, or it is over")
    if row.attempt != attempt:
        raise AttemptSuperseded(f"a newer attempt has claimed job {job}")
    return row
