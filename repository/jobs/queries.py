"""Queries of jobs, by their owners or without an owner's restriction."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from repository.db.database import Database
from repository.db.ids import full_id, is_id
from repository.db.models import AttemptRow, EventRow, JobRow, OutputRow, SubmissionRow
from repository.db.paging import bad_cursor
from repository.db.views import view_of
from repository.jobs.streams import StreamReader, StreamStore
from repository.jobs.transitions import job_not_found
from repository.jobs.views import job_views, reason_of, rejected_of, spec_of
from repository.storage.blobs import BlobReader, BlobStore
from vmjobs.errors import NotFound
from vmjobs.model import Job, JobEvent, JobState, Output, StreamName
from vmjobs.paths import check_path
from vmjobs.wire import JobPage, OutputList

MAX_PAGE: Final = 2000
MAX_EVENTS: Final = 10_000
MAX_SEQ: Final = 2**31 - 1


def find_job(session: Session, job_id: str, owner: str | None) -> JobRow:
    """Return a job's row without a lock.  Raises NotFound, also for another owner's job."""
    row = session.get(JobRow, job_id) if is_id(job_id) else None
    if row is None or (owner is not None and row.owner != owner):
        raise job_not_found(job_id)
    return row


@dataclass(frozen=True)
class JobQueries:
    """Reads jobs and their files.

    ``owner=None`` means any owner (for agents and the worker); with an owner, another owner's job is
    ``NotFound``.
    """

    database: Database
    blobs: BlobStore
    streams: StreamStore

    def full_id(self, text: str, owner: str) -> str:
        """Return the id of the owner's job whose id begins with ``text``; else ``text``.

        Raises AmbiguousId.
        """
        with self.database.read() as session:
            return full_id(session, JobRow.id, text, JobRow.owner == owner)

    def get(self, job_id: str, owner: str | None = None) -> Job:
        """One job.  Raises NotFound."""
        with self.database.read() as session:
            return job_views(session, [find_job(session, job_id, owner)])[0]

    def version(self, job_id: str, owner: str | None = None) -> int:
        """Return a number that grows with every change of the job: cheap, and usable as an ETag.

        Raises NotFound.
        """
        query = select(JobRow.version, JobRow.owner).where(JobRow.id == job_id)
        with self.database.read() as session:
            found = session.execute(query).one_or_none() if is_id(job_id) else None
        if found is None or (owner is not None and found.owner != owner):
            raise job_not_found(job_id)
        return int(found.version)

    def page(
        self,
        owner: str | None,
        states: Collection[JobState] = (),
        array: str = "",
        limit: int = 256,
        cursor: str = "",
    ) -> JobPage:
        """Return jobs, newest first; ``limit`` is capped at 2,000. array: its id or a prefix.

        Raises InvalidRequest for an invalid cursor, AmbiguousId.
        """
        limit = max(1, min(limit, MAX_PAGE))
        query = select(JobRow).order_by(JobRow.id.desc()).limit(limit + 1)
        if owner is not None:
            query = query.where(JobRow.owner == owner)
        if states:
            query = query.where(JobRow.state.in_([JobState(s).value for s in states]))
        if cursor:
            if not is_id(cursor):
                raise bad_cursor()
            query = query.where(JobRow.id < cursor)
        with self.database.read() as session:
            if array:
                visible_arrays = [SubmissionRow.owner == owner] if owner is not None else []
                array = full_id(session, SubmissionRow.id, array, *visible_arrays)
                if not is_id(array):
                    return JobPage(jobs=())
                query = query.where(JobRow.array_id == array)
            rows = session.scalars(query).all()
            more = rows[limit - 1].id if len(rows) > limit else ""
            return JobPage(jobs=tuple(job_views(session, rows[:limit])), next=more)

    def events(self, job_id: str, after: int = 0, owner: str | None = None) -> list[JobEvent]:
        """Return the job's history after event ``after``, at most 10,000 lines.  Raises NotFound."""
        with self.database.read() as session:
            find_job(session, job_id, owner)
            query = (
                select(EventRow)
                .where(EventRow.job_id == job_id, EventRow.seq > min(max(after, 0), MAX_SEQ))
                .order_by(EventRow.seq)
                .limit(MAX_EVENTS)
            )
            rows = session.scalars(query)
            return [view_of(JobEvent, row, reason=reason_of(row)) for row in rows]

    def outputs(self, job_id: str, owner: str | None = None) -> OutputList:
        """Return the outputs of the job's latest attempt.  Raises NotFound."""
        with self.database.read() as session:
            row = find_job(session, job_id, owner)
            query = (
                select(OutputRow).where(OutputRow.attempt_id == row.attempt).order_by(OutputRow.path)
            )
            found = tuple(view_of(Output, item) for item in session.scalars(query))
            rejected = rejected_of(session.get(AttemptRow, row.attempt))
            return OutputList(outputs=found, rejected=rejected)

    def open_stream(self, job_id: str, name: StreamName, owner: str | None = None) -> StreamReader:
        """Open the latest attempt's stream at its present length; empty if there is none.

        Raises NotFound (no such job).
        """
        with self.database.read() as session:
            attempt = find_job(session, job_id, owner).attempt
        return self.streams.open(job_id, attempt, name) if attempt else StreamReader(None, 0)

    def open_output(self, job_id: str, path: str, owner: str | None = None) -> BlobReader:
        """Open one output file (``.digest``, ``.size``, iterate for verified bytes; close it).

        Raises NotFound.
        """
        if not path.isprintable() or check_path(path):
            raise NotFound(f"job {job_id[:32]} has no output of that name")
        with self.database.read() as session:
            row = find_job(session, job_id, owner)
            digest = session.scalars(
                select(OutputRow.digest).where(
                    OutputRow.attempt_id == row.attempt, OutputRow.path == path
                )
            ).one_or_none()
        if digest is None:
            raise NotFound(f"job {job_id} has no output {path[:255]!r}")
        return self.blobs.open(digest)

    def open_input(self, job_id: str, name: str, owner: str | None = None) -> BlobReader:
        """Open one input file by its name in the spec.  Raises NotFound."""
        with self.database.read() as session:
            spec = spec_of(find_job(session, job_id, owner))
        for file in spec.inputs:
            if file.name == name:
                return self.blobs.open(file.digest)
        raise NotFound(f"job {job_id} has no input {name[:255]!r}")
