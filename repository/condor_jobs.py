"""Jobs that HTCondor alone knows: nothing of them is here but the machine as it was saved last.

A node claims such a job for a run, as it does one of the service's; a newer claim fences off older
ones. Nobody tells of a job that is removed from its queue: what was saved of it goes when nothing was
heard of it for ``checkpoint_seconds``.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from repository.core import Core
from repository.images.keeping import checkpoint_of, forget_checkpoint, note_not_resumed
from repository.images.sql import put
from repository.models import CondorJobRow
from vmjobs.errors import AttemptSuperseded, Forbidden, InvalidRequest, NotFound
from vmjobs.model import Checkpoint
from vmjobs.model import now as utc_now
from vmjobs.wire import CondorJobClaim

#: Of a job's owner as the service knows him: none of its own users has such a name.
OWNER_PREFIX = "condor:"


class CondorJobs(Core):
    """The part for them."""

    def claim_condor_job(self, job: str, claim: CondorJobClaim) -> Checkpoint | None:
        """Take the job for a run; what it can go on from. Repeating it is no error.

        Raises Forbidden: its owner is another one.
        """
        values = {
            "id": job,
            "owner": f"{OWNER_PREFIX}{claim.owner}",
            "attempt": claim.attempt,
            "failed": "",
            "heard": utc_now(),
        }
        with self.database.write() as session:
            row = put(
                session,
                CondorJobRow,
                values,
                key=("id",),
                change=("attempt", "heard"),
                returning=(CondorJobRow.owner,),
            )
            if row.owner != values["owner"]:
                raise Forbidden(f"job {job} is another owner's")
            return checkpoint_of(session, job)

    def has_condor_job(self, job: str) -> bool:
        """Whether a node has claimed a job of that id, and not told of its end."""
        with self.database.read() as session:
            return session.get(CondorJobRow, job) is not None

    def keep_condor_job(self, job: str, attempt: str, upload: str, checkpoint: Checkpoint) -> None:
        """Have the job's next run go on from a machine that was saved. Repeating it is no error.

        Raises NotFound; AttemptSuperseded; InvalidRequest (a machine that is not the job's, or of which
        nobody could say what it was made of); and as ``Images.keep_checkpoint``.
        """
        if checkpoint.making is None:
            raise InvalidRequest("the checkpoint does not say what the machine was made of")
        with self.database.write() as session:
            row = _current(session, job, attempt)
            before = checkpoint_of(session, job)
            if before == checkpoint:
                return  # the answer to the first delivery was lost
            known = before.machine if before else ""
            if checkpoint.machine != known and checkpoint.machine.rpartition("-")[2] != attempt:
                raise InvalidRequest(f"the machine {checkpoint.machine} is none of job {job}")
            self.images.keep_checkpoint(session, job, row.owner, upload, checkpoint)
            row.heard = utc_now()

    def condor_job_not_resumed(self, job: str, attempt: str) -> None:
        """The run could not go on from what was saved. Repeating it is no error.

        Raises NotFound, AttemptSuperseded.
        """
        with self.database.write() as session:
            row = _current(session, job, attempt)
            if row.failed != attempt:
                row.failed = attempt
                note_not_resumed(session, job)

    def end_condor_job(self, job: str, attempt: str) -> None:
        """The job is over: nothing of it is needed.  Raises NotFound, AttemptSuperseded."""
        with self.database.write() as session:
            session.delete(_current(session, job, attempt))
            forget_checkpoint(session, job)


def _current(session: Session, job: str, attempt: str) -> CondorJobRow:
    """The job's row, ours until the transaction ends."""
    query = select(CondorJobRow).where(CondorJobRow.id == job).with_for_update()
    row = session.scalars(query).one_or_none()
    if row is None:
        raise NotFound(f"there is no job {job[:64]}, or it is over")
    if row.attempt != attempt:
        raise AttemptSuperseded(f"a newer attempt has claimed job {job}")
    return row
