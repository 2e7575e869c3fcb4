"""Protocols for a job at its repository, as the agent uses it. The client library implements them."""

from __future__ import annotations

from typing import BinaryIO, Protocol

from vmjobs.file_transfer import ContentReceiver, ContentSource
from vmjobs.model import AttemptClaim, Checkpoint, InputFile, JobTicket, Output, Report, StreamName


class CheckpointTransfer(Protocol):
    """A job's checkpoint in its repository. Raises as :class:`JobSource`."""

    def open_upload(self, size: int) -> ContentReceiver:
        """Open an upload for ``size`` bytes of a checkpoint."""

    def save_checkpoint(self, upload: ContentReceiver, checkpoint: Checkpoint) -> None:
        """Store the checkpoint; the repository keeps its files until the next attempt resumes."""

    def saved(self) -> ContentSource:
        """The files of the job's checkpoint."""


class JobSource(CheckpointTransfer, Protocol):
    """One job in its repository, for the agent that has the job's token.

    Every method raises :class:`vmjobs.errors.Conflict` once another attempt has claimed the job,
    and :class:`vmjobs.errors.Unavailable` if the repository stays unreachable.
    """

    def claim(self, claim: AttemptClaim) -> JobTicket:
        """Claim the job for this attempt; the repository then refuses older attempts."""

    def end(self) -> Report:
        """The final report of a job that has ended.  Raises Conflict if it has not ended."""

    def resume(self, attempt: str) -> None:
        """Continue an attempt that an earlier process claimed."""

    def fetch_input(self, file: InputFile, sink: BinaryIO) -> None:
        """Write the file's bytes to ``sink``, and verify them against its digest."""

    def report(self, report: Report) -> None:
        """Deliver one report; reports arrive in the order of the calls."""

    def append(self, stream: StreamName, offset: int, data: bytes) -> None:
        """Append to a stream at ``offset``; repeated calls are harmless."""

    def put_output(self, path: str, source: BinaryIO, size: int) -> Output:
        """Store one output: the next ``size`` bytes of ``source``, which may have more."""


class CheckpointStore(CheckpointTransfer, Protocol):
    """Stores checkpoints of a transparent job. Raises as :class:`JobSource`."""

    def begin(self, attempt: str) -> Checkpoint | None:
        """Claim the job for this attempt; returns the checkpoint to resume from, if any.

        The repository then refuses older attempts.
        """

    def report_not_resumed(self) -> None:
        """Report that the attempt could not resume; the second report deletes the checkpoint."""

    def delete_checkpoints(self) -> None:
        """Delete all checkpoints, because the job has ended."""

    def close(self) -> None:
        """Close connections; further calls fail."""
