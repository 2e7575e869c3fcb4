"""Ways in which jobs end, end to end: REST, Celery, Condor-C, agent, VM.

All jobs are submitted at once; each test checks one of them. Contract tests of the agent and of its
guests have more ways.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.grid import Grid
from vmjobs.errors import Conflict
from vmjobs.model import ExitChannel, Job, JobState, ReasonCode, StreamName

HOSTILE = """#!/usr/bin/env python3
import glob, io, os, tarfile
disk = (glob.glob("/dev/ubdd") + glob.glob("/dev/vdd"))[0]
stream = io.BytesIO()
def entry(name, data=b"", kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(data), kind, link
    tar.addfile(info, io.BytesIO(data))
with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
    entry("exit.json", b'{"code": 0}')
    entry("outputs/../../../../tmp/escaped", b"boom")
    entry("/tmp/absolute", b"boom")
    entry("outputs/link", kind=tarfile.SYMTYPE, link="/etc/shadow")
    entry("outputs/device", kind=tarfile.BLKTYPE)
    entry("outputs/good.txt", b"good")
with open(disk, "wb") as out:
    out.write(stream.getvalue())
    out.flush()
    os.fsync(out.fileno())
os.execv("/bin/busybox", ["busybox", "poweroff", "-f"])
"""


@dataclass(frozen=True)
class Case:
    script: str
    code: ReasonCode
    exit: int | None = None
    signal: int | None = None
    channel: ExitChannel | None = ExitChannel.ENDPOINT
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> JobState:
        return JobState.COMPLETED if self.code is ReasonCode.SUCCEEDED else JobState.FAILED


SH = "#!/bin/sh\n"
CASES = {
    "succeeds": Case(SH + "echo hello; echo oops >&2", ReasonCode.SUCCEEDED, exit=0),
    "exits-3": Case(SH + "exit 3", ReasonCode.SCRIPT_FAILED, exit=3),
    "killed": Case(SH + "kill -9 $$", ReasonCode.SCRIPT_KILLED, signal=9),
    "closes-stdout": Case(
        SH + "echo before; exec >&- 2>&-; echo x > a.txt", ReasonCode.SUCCEEDED, exit=0,
        fields={"outputs": ["a.txt"]},
    ),
    "output-missing": Case(
        SH + "echo x > a.txt", ReasonCode.OUTPUT_MISSING, exit=0, fields={"outputs": ["a.txt", "*.csv"]}
    ),
    "no-report": Case(SH + "exec busybox poweroff -f", ReasonCode.NO_EXIT_REPORT, channel=None),
    "too-slow": Case(SH + "sleep 100", ReasonCode.TIMED_OUT, channel=None, fields={"run_seconds": 2}),
    "offline": Case(
        SH + 'echo "$1 $A"; cat > /dev/null; echo x > sub.txt', ReasonCode.SUCCEEDED, exit=0,
        channel=ExitChannel.OUTPUT_DISK,
        fields={
            "network": "none", "outputs": ["*.txt"],
            "arguments": ["it's"], "environment": {"A": 'a "b"'},
        },
    ),
    "hostile-tar": Case(
        HOSTILE, ReasonCode.OUTPUT_MISSING, exit=0, channel=ExitChannel.OUTPUT_DISK,
        fields={"image": "hep", "network": "none", "memory": 256, "outputs": ["*"]},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def ended(grid: Grid) -> dict[str, Job]:
    jobs = {name: grid.submit(case.script, name=name, **case.fields)[0] for name, case in CASES.items()}
    return dict(zip(jobs, grid.wait(*jobs.values(), timeout=400), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_outcome(ended: dict[str, Job], name: str) -> None:
    job, case = ended[name], CASES[name]
    assert (job.state, job.reason.code) == (case.state, case.code), job.reason.message
    if case.channel is None:
        assert job.exit is None
    else:
        assert job.exit is not None
        assert (job.exit.code, job.exit.signal, job.exit.channel) == (
            case.exit,
            case.signal,
            case.channel,
        )


def test_streams_are_told_apart_and_phases_have_their_seconds(
    grid: Grid, ended: dict[str, Job]
) -> None:
    job = ended["succeeds"]
    assert grid.out(job) == "hello\n"
    assert b"".join(grid.api.stream(job.id, StreamName.ERR)) == b"oops\n"
    assert set(job.seconds) >= {"queued", "staging", "booting", "running", "collecting"}


def test_outputs_arrive_though_some_are_missing(
    grid: Grid, ended: dict[str, Job], tmp_path: Path
) -> None:
    (output,) = ended["output-missing"].outputs
    assert output.path == "a.txt"
    path = grid.api.download_output(ended["output-missing"].id, output, tmp_path)
    assert path.read_text() == "x\n"
    assert [o.path for o in ended["closes-stdout"].outputs] == ["a.txt"]


def test_a_job_without_network_gets_arguments_and_environment(
    grid: Grid, ended: dict[str, Job]
) -> None:
    assert grid.out(ended["offline"]) == 'it\'s a "b"\n'


def test_hostile_entries_are_refused_one_by_one(ended: dict[str, Job]) -> None:
    job = ended["hostile-tar"]
    assert [o.path for o in job.outputs] == ["good.txt"]
    assert len(job.rejected) == 4


def test_a_job_that_has_ended_cannot_be_canceled(grid: Grid, ended: dict[str, Job]) -> None:
    with pytest.raises(Conflict):
        grid.api.cancel(ended["succeeds"].id)


def test_nothing_is_left_on_the_nodes(grid: Grid, ended: dict[str, Job]) -> None:
    grid.assert_clean(*ended.values())
