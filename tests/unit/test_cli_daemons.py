"""What ``vmjobs agent`` and ``vmjobs worker`` refuse before they change anything."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.kit.cli import Run


def test_a_second_agent_leaves_alone_what_the_first_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Run
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
        assert f"state_dir: another agent already uses {state} [" in typed("agent", code=78).err
    assert theirs.exists()
    assert (state / "runs" / "ab").exists()


def test_an_agent_without_nbdkit_starts_nothing_lazily(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Run
) -> None:
    settings = {"STATE_DIR": "state", "AGENT_TOKEN_FILE": "token", "LAZY_START": "true"}
    monkeypatch.chdir(tmp_path)
    Path("token").touch()
    for name, value in settings.items():
        monkeypatch.setenv(f"VMJOBS_{name}", value)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "lazy_start: nbdkit is not installed" in typed("agent", code=78).err


def test_a_builder_does_not_run_as_root(
    path: Path, monkeypatch: pytest.MonkeyPatch, typed: Run
) -> None:
    monkeypatch.setenv("VMJOBS_CONFIG", "/dev/null")
    monkeypatch.setenv("VMJOBS_DATA_DIR", str(path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    error = typed("worker", "--builds", code=78).err
    assert "does not run as root" in error
    assert "setpriv" in error
    assert not path.exists()  # root has created nothing
