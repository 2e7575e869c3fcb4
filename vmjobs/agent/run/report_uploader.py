"""Uploads a run's reports and streams to the job's repository.

A run never waits for the network: it queues reports here and writes streams to files. The uploader
delivers reports in order, continues each stream where the repository has it, and retries while the
repository is out of reach.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vmjobs.agent.background import RetryingLoop, start_thread
from vmjobs.agent.file_watch import read_piece
from vmjobs.agent.job_source import JobSource
from vmjobs.agent.vm.events import EventQueue, RunSuperseded
from vmjobs.errors import (
    AttemptSuperseded,
    Conflict,
    Forbidden,
    InvalidRequest,
    JobFinal,
    PayloadTooLarge,
    Unauthenticated,
    VMJobsError,
)
from vmjobs.model import Report, StreamName

log = logging.getLogger(__name__)


@contextmanager
def _drop_if_rejected(what: str) -> Iterator[None]:
    """Drop items that the repository rejects for good, so that the rest can be delivered."""
    try:
        yield
    except (AttemptSuperseded, JobFinal):
        raise
    except (Conflict, InvalidRequest, PayloadTooLarge) as error:
        log.error("%s was rejected and is dropped: %s", what, error)


class ReportUploader(RetryingLoop):
    """Delivers the reports and streams of one attempt, in a thread of its own.

    :meth:`wake` has it read the stream files again.
    """

    purpose = "deliver to the job's repository"

    def __init__(
        self, source: JobSource, event_queue: EventQueue, streams: Mapping[StreamName, Path]
    ) -> None:
        super().__init__()
        self._source = source
        self._event_queue = event_queue
        self._streams, self._sent = streams, dict.fromkeys(streams, 0)
        self._reports: deque[Report] = deque()
        self._idle = True
        self.superseded = ""
        start_thread("uploader", self.run)

    def report(self, report: Report) -> None:
        """Deliver a report, after all earlier ones."""
        self._reports.append(report)
        self.wake()

    def flush(self, timeout: float) -> bool:
        """Wait until all is delivered. False after ``timeout`` seconds, or if superseded."""
        self.wake()
        with self._changed:
            done = self._changed.wait_for(
                lambda: self.superseded or (self._idle and not self._due), timeout
            )
        return bool(done) and not self.superseded

    def has_undelivered(self) -> bool:
        """Whether the streams have undelivered bytes."""
        return any(read_piece(path, self._sent[name]) for name, path in self._streams.items())

    def step(self) -> None:
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._due or self._stopped)
            self._idle = self._due = False
        try:
            self._deliver()
        except (AttemptSuperseded, JobFinal, Unauthenticated, Forbidden) as error:
            self._give_up(error.message)
        except (VMJobsError, OSError):
            self.wake()
            raise

    def _deliver(self) -> None:
        while self._reports and not self._stopped:
            if self._reports[0].state.final:
                self._deliver_streams()  # the repository accepts nothing after a job's final report
            with _drop_if_rejected("a report"):
                self._source.report(self._reports[0])
            self._reports.popleft()
        self._deliver_streams()

    def _deliver_streams(self) -> None:
        for name, path in self._streams.items():
            while not self._stopped and (data := read_piece(path, self._sent[name])):
                with _drop_if_rejected(f"a part of {name}"):
                    self._source.append(name, self._sent[name], data)
                self._sent[name] += len(data)

    def _give_up(self, why: str) -> None:
        with self._changed:
            self.superseded, self._stopped = why, True
            self._reports.clear()
            self._changed.notify_all()
        self._event_queue.put(RunSuperseded(why))
