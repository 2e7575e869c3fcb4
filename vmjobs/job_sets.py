"""Sets of jobs in requests of the REST interface, and what is answered of each of them."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vmjobs.model import JobState
from vmjobs.wire import Envelope

#: Jobs that one request may be about.
MAX_SELECTED: Final = 10_000


class JobSelection(BaseModel):
    """Which of one's jobs a request is about: those to which all that is given applies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    jobs: tuple[str, ...] = Field(
        default=(),
        max_length=MAX_SELECTED,
        description="their ids, or those of arrays for all of their jobs",
    )
    state: tuple[JobState, ...] = Field(
        default=(), max_length=32, description="only jobs in these states"
    )

    @model_validator(mode="after")
    def _says_which(self) -> JobSelection:
        if not (self.jobs or self.state):
            raise ValueError("say which jobs: give jobs, state, or both")
        return self


class JobStatus(Envelope):
    """A job, and the state that it is in."""

    id: str
    array: str
    index: int
    state: JobState


class JobStatusList(Envelope):
    """What became of a set of jobs, the newest first."""

    jobs: tuple[JobStatus, ...]
