"""``vmjobs agent``: what it refuses before it touches anything."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from click.testing import CliRunner

from vmjobs.cli.agent import agent
from vmjobs.errors import ConfigError


def test_a_second_agent_leaves_alone_what_the_first_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    theirs = state / "handed" / "condor.17" / "tree"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("of a job that is about to begin")
    (state / "runs" / "ab").mkdir(parents=True)
    monkeypatch.setenv("VMJOBS_STATE_DIR", str(state))
    monkeypatch.setenv("VMJOBS_IMAGE_DIR", str(tmp_path / "images"))
    with (state / "agent.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = CliRunner().invoke(agent)
    assert isinstance(refused.exception, ConfigError)
    assert refused.exception.message == f"state_dir: another agent runs, and has {state}"
    assert theirs.exists()
    assert (state / "runs" / "ab").exists()
