from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import htcondor2
import pytest
from htcondor2 import JobEventType

from condor.events.event_log import EventLogs, apply_event
from condor.events.job_status import observe
from vmjobs.batch import BatchStatus, Observation

SUBMIT = (
    "000 (012.{proc:03d}.000) 2026-11-20 04:18:40 Job submitted from host: "
    "<10.0.0.2:9618?alias=submit.grid>\n"
    "    vmjobs {job}\n...\n"
)
GRID_SUBMIT = (
    "027 (012.{proc:03d}.000) 2026-11-20 04:18:58 Job submitted to grid resource\n"
    "    GridResource: condor site.grid site.grid\n"
    "    GridJobId: condor site.grid site.grid 3.0\n...\n"
)
EXECUTE = (
    "001 (012.{proc:03d}.000) 2026-11-20 04:19:13 Job executing on host: condor site.grid site.grid\n"
    "...\n"
)
HELD = (
    "012 (012.{proc:03d}.000) 2026-11-20 04:19:20 Job was held.\n"
    "\tthe disk is full\n\tCode 1 Subcode 0\n...\n"
)
ABORTED = "009 (012.{proc:03d}.000) 2026-11-20 04:19:21 Job was aborted.\n\tno longer wanted\n...\n"
USAGE = "\t\tUsr 0 00:00:00, Sys 0 00:00:00  -  Run Remote Usage\n" * 4
TERMINATED = (
    "005 (012.{proc:03d}.000) 2026-11-20 04:23:44 Job terminated.\n"
    "\t(1) Normal termination (return value 7)\n" + USAGE + "\t0  -  Run Bytes Sent By Job\n...\n"
)
KILLED = (
    "005 (012.{proc:03d}.000) 2026-11-20 04:23:44 Job terminated.\n"
    "\t(0) Abnormal termination (signal 9)\n\t(0) No core file\n"
    + USAGE
    + "\t0  -  Run Bytes Sent By Job\n...\n"
)


class Logs:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.reader = self.restarted()

    def restarted(self) -> EventLogs:
        return EventLogs(lambda array: self.root / array, "submit.grid")

    def add(self, text: str, array: str = "a", **values: Any) -> None:
        with (self.root / array).open("a") as file:
            file.write(text.format(**{"proc": 0, "job": "j0", **values}))

    def one(self) -> Observation:
        (found,) = self.reader.latest(["a"])
        return found


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path)


def test_a_job_from_submission_to_its_end(logs: Logs) -> None:
    assert logs.reader.latest(["a"]) == []
    logs.add(SUBMIT)
    first = logs.one()
    assert (first.job_id, first.status) == ("j0", BatchStatus.IDLE)
    assert (first.ref.schedd, first.ref.cluster, first.ref.proc) == ("submit.grid", 12, 0)
    logs.add(GRID_SUBMIT)
    assert logs.one().status is BatchStatus.IDLE
    assert logs.one().ref.grid_job_id == "condor site.grid site.grid 3.0"
    logs.add(EXECUTE)
    assert logs.one().status is BatchStatus.RUNNING
    logs.add(HELD)
    assert (logs.one().status, logs.one().reason) == (BatchStatus.HELD, "the disk is full")
    logs.add(EXECUTE)
    assert (logs.one().status, logs.one().reason) == (BatchStatus.RUNNING, "")
    logs.add(TERMINATED)
    assert (logs.one().status, logs.one().exit_code) == (BatchStatus.COMPLETED, 7)
    logs.add(EXECUTE)
    assert logs.one().status is BatchStatus.COMPLETED
    assert logs.restarted().latest(["a"]) == [logs.one()]


def test_a_signal_and_a_removal(logs: Logs) -> None:
    for proc in (0, 1):
        logs.add(SUBMIT, proc=proc, job=f"j{proc}")
    logs.add(KILLED, proc=0)
    logs.add(ABORTED, proc=1)
    killed, removed = logs.reader.latest(["a"])
    assert (killed.status, killed.exit_code, killed.exit_signal) == (BatchStatus.COMPLETED, None, 9)
    assert (removed.status, removed.reason) == (BatchStatus.REMOVED, "no longer wanted")


@pytest.mark.parametrize("cut", [1, 10, 60, 78, 79, 120, 300, -5, -4, -3, -2, -1])
def test_an_event_written_in_part_is_read_when_it_is_whole(logs: Logs, cut: int) -> None:
    text = TERMINATED.format(proc=0)
    logs.add(SUBMIT + EXECUTE)
    assert logs.one().status is BatchStatus.RUNNING
    logs.add(text[:cut])
    assert logs.one().status is BatchStatus.RUNNING
    logs.add(text[cut:])
    assert logs.one().exit_code == 7
    logs.add(SUBMIT + EXECUTE + ABORTED, proc=1, job="j1")
    assert [o.status.value for o in logs.reader.latest(["a"])] == ["completed", "removed"]


def test_events_of_strangers_and_notes_of_others_are_left_out(logs: Logs) -> None:
    logs.add(EXECUTE, proc=5)
    logs.add(SUBMIT.replace("vmjobs {job}", "DAG Node: A"), proc=6)
    assert logs.reader.latest(["a"]) == []


def test_an_unchanged_log_is_not_opened(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    logs.add(SUBMIT)
    before = logs.one()

    def refuse(*_: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(htcondor2, "JobEventLog", refuse)
    assert logs.one() == before


def test_a_log_that_was_replaced_is_read_afresh(logs: Logs) -> None:
    logs.add(SUBMIT + EXECUTE)
    assert logs.one().status is BatchStatus.RUNNING
    (logs.root / "a").unlink()
    logs.add(SUBMIT, job="other")
    assert logs.one().job_id == "other"
    (logs.root / "a").unlink()
    assert logs.reader.latest(["a"]) == []


def test_of_a_job_queued_twice_the_later_queueing_counts(logs: Logs) -> None:
    logs.add(SUBMIT + ABORTED)
    logs.add(SUBMIT.replace("(012", "(013"))
    assert (logs.one().status, logs.one().ref.cluster) == (BatchStatus.IDLE, 13)


def test_garbage_and_unreadable_logs_raise_nothing(logs: Logs) -> None:
    (logs.root / "a").write_bytes(os.urandom(3000))
    (logs.root / "b").mkdir()
    logs.add(SUBMIT, array="c", job="c0")
    assert [o.job_id for o in logs.reader.latest(["a", "b", "c"])] == ["c0"]


@pytest.mark.parametrize(
    ("kind", "event", "status", "reason"),
    [
        (JobEventType.JOB_EVICTED, {"Reason": "preempted"}, "idle", "preempted"),
        (JobEventType.SHADOW_EXCEPTION, {"Message": "lost\nit"}, "idle", "lost it"),
        (JobEventType.JOB_SUSPENDED, {}, "suspended", ""),
        (JobEventType.JOB_UNSUSPENDED, {}, "running", ""),
        (JobEventType.JOB_RELEASED, {"Reason": "by hand"}, "idle", "by hand"),
        (JobEventType.JOB_DISCONNECTED, {"DisconnectReason": "net"}, "running", "net"),
        (JobEventType.JOB_RECONNECT_FAILED, {"Reason": "gone"}, "idle", "gone"),
        (
            JobEventType.GRID_RESOURCE_DOWN,
            {"GridResource": "condor s c"},
            "idle",
            "condor s c does not answer",
        ),
        (34, {}, "idle", ""),
    ],
)
def test_what_each_event_means(kind: int, event: dict[str, Any], status: str, reason: str) -> None:
    known: dict[tuple[int, int], Observation] = {}
    where = {"Cluster": 1, "Proc": 0}
    apply_event(known, JobEventType.SUBMIT, {**where, "LogNotes": "vmjobs j"}, "s")
    apply_event(known, kind, {**where, **event}, "s")
    assert (known[1, 0].status.value, known[1, 0].reason) == (status, reason)


@pytest.mark.parametrize(
    ("ad", "in_queue", "status", "reason", "code", "signal"),
    [
        ({"JobStatus": 2}, True, "running", "", None, None),
        ({"JobStatus": 6}, True, "running", "", None, None),
        ({"JobStatus": 7}, True, "suspended", "", None, None),
        ({"JobStatus": 5, "HoldReason": "full"}, True, "held", "full", None, None),
        ({"JobStatus": 3, "RemoveReason": "r"}, True, "running", "being removed: r", None, None),
        ({"JobStatus": 3, "RemoveReason": "r"}, False, "removed", "r", None, None),
        ({"JobStatus": 4, "ExitCode": 7}, False, "completed", "", 7, None),
        ({"JobStatus": 4, "ExitBySignal": True, "ExitSignal": 9}, True, "completed", "", None, 9),
        ({"JobStatus": 4}, True, "completed", "", None, None),
        ({"JobStatus": 1}, False, "removed", "", None, None),
    ],
)
def test_what_a_job_ad_means(
    ad: dict[str, Any], in_queue: bool, status: str, reason: str, code: int | None, signal: int | None
) -> None:
    base = {"VMJobsId": "j", "ClusterId": 3, "ProcId": 1, "GridJobId": "condor s c 1.0"}
    found = observe({**base, **ad}, "s", in_queue=in_queue)
    assert (found.status.value, found.reason) == (status, reason)
    assert (found.exit_code, found.exit_signal) == (code, signal)
    assert (found.ref.cluster, found.ref.proc, found.ref.grid_job_id) == (3, 1, "condor s c 1.0")
