"""Which job a slot runs, from the starter's arguments and the startd's answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from condor.node.slot import SlotJob, job_of_starter, slot_name
from vmjobs.agent.condor_job.starter import StarterProcess
from vmjobs.errors import Unavailable

STARTER = StarterProcess(42, 22)
#: As condor_status of HTCondor 23.9.6 prints it.
ANSWER = """[
{
  "Name": "slot1@node2.grid"
}
,
{
  "GlobalJobId": "site.grid#29.0#1795314046",
  "Name": "slot1_1@node2.grid",
  "RemoteUser": "ada@grid"
}
]
"""


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A starter of slot1_1 with PID 42, and a fake of HTCondor's tools."""
    (tmp_path / "42").mkdir()
    words = ("condor_starter", "-f", "-local-name", "slot_type_1", "-a", "slot1_1", "172.18.0.2")
    (tmp_path / "42/cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    (tmp_path / "42/stat").write_text(f"42 (condor_starter) S {' '.join(map(str, range(4, 30)))}\n")
    tool(tmp_path, "condor_config_val", '[ "$1" = FULL_HOSTNAME ] && echo node2.grid')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_the_job_of_the_starters_slot(proc: Path) -> None:
    (proc / "answer").write_text(ANSWER)
    tool(proc, "condor_status", f'[ "$1 $2" = "-direct node2.grid" ] && cat {proc}/answer')
    found = job_of_starter(STARTER, proc)
    assert found == SlotJob("site.grid#29.0#1795314046", "ada@grid")
    assert re.fullmatch("htc[0-9a-f]{29}", found.key)


def test_no_two_jobs_are_called_the_same(proc: Path) -> None:
    """Two users' jobs differ too: users cannot change their identity in a job's ad."""
    found = SlotJob("site.grid#29.0#1795314046", "ada@grid")
    assert found.key != SlotJob("site.grid#29.1#1795314046", "ada@grid").key
    assert found.key != SlotJob("site.grid#29.0#1795314046", "bob@grid").key


def test_a_starter_that_has_gone_meanwhile(proc: Path) -> None:
    """Its PID and its slot may belong to another user by now."""
    (proc / "answer").write_text(ANSWER)
    tool(proc, "condor_status", f"cat {proc}/answer")
    with pytest.raises(Unavailable, match="has gone"):
        job_of_starter(StarterProcess(42, STARTER.birth - 1), proc)
    with pytest.raises(Unavailable, match="has gone"):
        job_of_starter(StarterProcess(43, 1), proc)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 1", "does not answer"),
        ("true", "has no job in slot1_1"),
        ('echo \'[{"Name": "slot1_1@node2.grid"}]\'', "has no job in slot1_1"),
        ("echo oops", "no list of ads"),
    ],
)
def test_a_startd_that_does_not_say(proc: Path, script: str, why: str) -> None:
    tool(proc, "condor_status", script)
    with pytest.raises(Unavailable, match=why):
        job_of_starter(STARTER, proc)


def test_a_starter_that_names_no_slot() -> None:
    assert slot_name(b"condor_starter\0-a\0slot2@node\0host\0") == "slot2"
    for words in (b"condor_starter\0-f\0", b"condor_starter\0-a\0"):
        with pytest.raises(Unavailable, match="no slot name"):
            slot_name(words)
