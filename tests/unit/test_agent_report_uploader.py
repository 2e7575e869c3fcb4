"""Delivery of reports and output to a repository with outages."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tests.kit.reports import report
from vmjobs.agent.run.report_uploader import ReportUploader
from vmjobs.agent.vm.events import EventQueue, RunSuperseded
from vmjobs.errors import AttemptSuperseded, Unavailable
from vmjobs.model import JobState, Report, StreamName


class Ledger:
    """A repository that records what it receives, and can be made to refuse."""

    def __init__(self) -> None:
        self.states: list[JobState] = []
        self.bytes = dict.fromkeys(StreamName, b"")
        self.refuse: Exception | None = None
        self.takes_streams = True
        self.refused = threading.Event()

    def _gate(self) -> None:
        if self.refuse is not None:
            self.refused.set()
            raise self.refuse

    def report(self, report: Report) -> None:
        self._gate()
        self.states.append(report.state)

    def append(self, stream: StreamName, offset: int, data: bytes) -> None:
        if not self.takes_streams:
            self.refused.set()
            raise Unavailable("api", "down")
        self._gate()
        assert offset == len(self.bytes[stream])
        self.bytes[stream] += data


def test_reports_keep_their_order_and_streams_every_byte(tmp_path: Path) -> None:
    ledger, path = Ledger(), tmp_path / "out"
    uploader = ReportUploader(ledger, EventQueue(), {StreamName.OUT: path})
    states = [JobState.STAGING, JobState.BOOTING, JobState.RUNNING]
    for number, state in enumerate(states):
        with path.open("ab") as file:
            file.write(bytes([number]) * 700_000)
        uploader.wake()
        uploader.report(report(state))
    assert uploader.flush(10)
    assert ledger.states == states
    assert ledger.bytes[StreamName.OUT] == path.read_bytes()
    uploader.stop()


def test_an_outage_delays_and_loses_nothing(tmp_path: Path) -> None:
    ledger, path = Ledger(), tmp_path / "err"
    path.write_bytes(b"before")
    ledger.refuse = Unavailable("api", "down")
    uploader = ReportUploader(ledger, EventQueue(), {StreamName.ERR: path})
    uploader.report(report(JobState.STAGING))
    assert ledger.refused.wait(10)
    assert not uploader.flush(0.1)
    ledger.refuse = None
    assert uploader.flush(10)
    assert (ledger.states, ledger.bytes[StreamName.ERR]) == ([JobState.STAGING], b"before")
    uploader.stop()


def test_an_end_is_told_once_all_that_was_printed_is_there(tmp_path: Path) -> None:
    """The repository accepts nothing for a job that has ended."""
    ledger, path = Ledger(), tmp_path / "out"
    path.write_bytes(b"all")
    ledger.takes_streams = False
    uploader = ReportUploader(ledger, EventQueue(), {StreamName.OUT: path})
    uploader.report(report(JobState.COLLECTING))
    uploader.report(report(JobState.COMPLETED))
    assert ledger.refused.wait(10)
    assert not uploader.flush(0.1)
    assert (ledger.states, uploader.has_undelivered()) == ([JobState.COLLECTING], True)
    ledger.takes_streams = True
    assert uploader.flush(10)
    assert (ledger.states[-1], ledger.bytes[StreamName.OUT]) == (JobState.COMPLETED, b"all")
    assert not uploader.has_undelivered()
    uploader.stop()


def test_a_superseded_attempt_stops_talking_and_the_run_hears_of_it() -> None:
    ledger, event_queue = Ledger(), EventQueue()
    ledger.refuse = AttemptSuperseded("a newer attempt has the job")
    uploader = ReportUploader(ledger, event_queue, {})
    uploader.report(report(JobState.RUNNING))
    seen = event_queue.next(time.monotonic() + 10)
    assert isinstance(seen, RunSuperseded)
    assert not uploader.flush(10)
    uploader.stop()
