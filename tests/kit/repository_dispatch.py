"""A repository that sends jobs to a simulated scheduler, and a clock that tests set."""

from __future__ import annotations

from datetime import timedelta

import pytest

from repository.jobs import condor_sync, dispatcher
from repository.service import Repository
from tests.kit.repository_jobs import Ledger, bring, claim, dispatch_context, one, told
from vmjobs.batch import BatchStatus
from vmjobs.model import Job, JobState, ReasonCode, now

S, B = JobState, BatchStatus


class Grid:
    """A repository, a scheduler, the calls between them, and a clock that a test sets."""

    def __init__(self, repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
        self.repository, self.schedd, self._patch = repository, Ledger(), monkeypatch
        self.parts = dispatch_context(repository, self.schedd)

    def later(self, span: timedelta) -> None:
        """Advance the clock that grace periods use."""
        for module in (condor_sync, dispatcher):
            self._patch.setattr(module, "utc_now", lambda: now() + span)

    def submit(self, state: JobState | None = None) -> tuple[Job, str]:
        """Submit a job, bring it to a state by an attempt; return both."""
        job = one(self.repository)
        dispatcher.submit_array(self.parts, job.array)
        attempt = claim(self.repository, job.id) if state else ""
        if state and state is not S.QUEUED:
            bring(self.repository, job.id, attempt, state)
        return job, attempt

    def cancel(self, job: Job) -> None:
        """Cancel a job, also at the scheduler."""
        assert self.repository.job_actions.cancel(job.id).state is S.CANCELING
        dispatcher.cancel_jobs(self.parts, [job.id])

    def report(
        self,
        job: Job,
        attempt: str,
        state: JobState,
        code: ReasonCode = ReasonCode.PROGRESS,
        *exit_code: int,
    ) -> None:
        self.repository.attempts.report(job.id, attempt, told(state, code, *exit_code))

    def track(self, job: Job) -> JobState:
        """Read the scheduler's events; return the job's state."""
        dispatcher.track(self.parts)
        return self.state(job)

    def sweep(self) -> None:
        dispatcher.sweep(self.parts)

    def state(self, job: Job) -> JobState:
        return self.repository.jobs.get(job.id).state

    def end(self, job: Job) -> tuple[JobState, ReasonCode]:
        found = self.repository.jobs.get(job.id)
        return found.state, found.reason.code


@pytest.fixture
def grid(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> Grid:
    return Grid(repository, monkeypatch)
