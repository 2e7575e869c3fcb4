"""Sets of jobs in requests of the REST interface, and the replies about each job."""

from __future__ import annotations

from typing import Final

from pydantic import Field, model_validator

from vmjobs.model import FrozenModel, JobState, LenientModel

#: Maximum number of jobs in one request.
MAX_SELECTED_JOBS: Final = 10_000


class JobSelection(FrozenModel):
    """Selects some of the caller's jobs: those that match all given fields."""

    jobs: tuple[str, ...] = Field(
        default=(),
        max_length=MAX_SELECTED_JOBS,
        description="ids of jobs, or of arrays for all of their jobs",
    )
    state: tuple[JobState, ...] = Field(
        default=(), max_length=32, description="only jobs in these states"
    )

    @model_validator(mode="after")
    def _check_selection(self) -> JobSelection:
        if not (self.jobs or self.state):
            raise ValueError("say which jobs: give jobs, state, or both")
        return self


class JobStatus(LenientModel):
    """A job and its state."""

    id: str
    array: str
    index: int
    state: JobState


class JobStatusList(LenientModel):
    """The states of a set of jobs, newest job first."""

    jobs: tuple[JobStatus, ...]
