"""Reports of runs, for tests."""

from __future__ import annotations

from typing import Any

from vmjobs.model import ExitChannel, ExitStatus, JobState, ReasonCode, Report, now, reason


def ended(code: int | None = None, signal: int | None = None) -> ExitStatus:
    """The exit status of a job, as its guest reports it."""
    return ExitStatus(code=code, signal=signal, channel=ExitChannel.ENDPOINT)


def report(
    state: JobState, code: ReasonCode = ReasonCode.PROGRESS, message: str = "", **fields: Any
) -> Report:
    """A report with the current time."""
    return Report(state=state, reason=reason(code, message), time=now(), **fields)
