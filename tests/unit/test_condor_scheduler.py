"""``CondorScheduler`` without a schedd (tests/integration/test_condor_grid.py: with one)."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest

from condor import names
from condor.submit.scheduler import CondorScheduler
from vmjobs.batch import BatchJob
from vmjobs.config import Config
from vmjobs.errors import InvalidSpec, Unavailable
from vmjobs.model import CondorRef, JobAction, JobSpec


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CondorScheduler:
    """A scheduler whose collector does not answer."""
    monkeypatch.setenv("CONDOR_CONFIG", "/dev/null")
    config = Config(spool_dir=tmp_path / "spool", schedd_name="s.grid", schedd_pool="127.0.0.1:9")
    return CondorScheduler(config, timeout=20.0)


def batch(**fields: str) -> list[BatchJob]:
    spec = JobSpec(image="generic", script="#!/bin/sh\n", **fields)
    return [BatchJob("j0", "a", 0, "alice", spec, "the token")]


def test_a_submission_that_fails_leaves_its_marker(scheduler: CondorScheduler, tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        scheduler.submit(batch())
    assert caught.value.service == "schedd"
    assert "127.0.0.1:9" in caught.value.message
    array = tmp_path / "spool" / "a"
    token = array / "j0" / names.TOKEN
    assert (array / names.SUBMIT_MARKER).exists()
    assert token.read_text() == "the token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert array.stat().st_mode & 0o777 == 0o700
    assert not list(array.rglob("*.new"))
    with pytest.raises(Unavailable):
        scheduler.submit(batch())
    scheduler.forget("a")
    assert not array.exists()
    scheduler.forget("a")


def test_a_submission_that_outlives_its_worker_is_waited_for(tmp_path: Path) -> None:
    config = Config(spool_dir=tmp_path, schedd_pool="127.0.0.1:9")
    with (tmp_path / names.LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        left = subprocess.Popen(["sleep", "60"], pass_fds=[file.fileno()])
    try:
        with pytest.raises(Unavailable, match="an earlier submission is still running"):
            CondorScheduler(config, timeout=0.2).submit(batch())
        assert not (tmp_path / "a").exists()
    finally:
        left.kill()
        left.wait()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
        CondorScheduler(config, timeout=20.0).submit(batch())


def test_a_spec_that_cannot_be_described_writes_nothing(
    scheduler: CondorScheduler, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSpec):
        scheduler.submit(batch(route="nowhere"))
    assert not (tmp_path / "spool").exists()
    assert scheduler.submit([]) == {}


def test_every_call_says_which_daemon_does_not_answer(scheduler: CondorScheduler) -> None:
    jobs = [CondorRef(schedd="s.grid", cluster=1, proc=0)]
    for ask in (lambda: scheduler.query(["j0"]), lambda: scheduler.act(JobAction.CANCEL, jobs, "why")):
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
            ask()
    scheduler.act(JobAction.HOLD, [], "why")
    assert scheduler.query([]) == []
    assert scheduler.watch(["a"]) == []


@pytest.mark.parametrize("bad", ["..", "a/b", "", "a b"])
def test_ids_stay_inside_of_the_spool(scheduler: CondorScheduler, bad: str) -> None:
    for use in (scheduler.forget, lambda bad: scheduler.query([bad])):
        with pytest.raises(ValueError, match="not the id"):
            use(bad)
