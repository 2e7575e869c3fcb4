"""The one way to run another program."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from vmjobs.errors import HypervisorError, VMJobsError
from vmjobs.subprocess import command_line, run


def test_output_and_status() -> None:
    done = run(["sh", "-c", "cat; echo oops >&2; exit 3"], timeout=10, data=b"in", check=False)
    assert (done.stdout, done.stderr, done.returncode, done.text) == (b"in", b"oops\n", 3, "in")


def test_a_failure_reads_as_a_command(tmp_path: Path) -> None:
    with pytest.raises(HypervisorError) as caught:
        run(["sh", "-c", "echo no luck >&2; exit 2"], timeout=10, cwd=tmp_path, error=HypervisorError)
    expected = f"exit status 2: cd {tmp_path} && sh -c 'echo no luck >&2; exit 2': no luck"
    assert caught.value.message == expected


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(VMJobsError, match="cannot run: no-such-program -x: No such file"):
        run(["no-such-program", "-x"], timeout=10)


def test_a_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(VMJobsError, match=r"no end after 0\.2 s: sleep 60"):
        run(["sleep", "60"], timeout=0.2)
    assert time.monotonic() - began < 10


def test_a_deadline_ends_what_was_started_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pytest.raises(VMJobsError, match="no end after"):
        run(["sh", "-c", f"sleep 60 & echo $! >{note}; wait"], timeout=1)
    status = Path("/proc") / note.read_text().strip() / "stat"
    deadline = time.monotonic() + 10
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def test_secrets_do_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    text = run(["env"], timeout=10, env={"WANTED": "1"}).text
    assert "SOME_TOKEN" not in text
    assert "WANTED=1" in text
    assert "PATH=" in text


def test_command_lines_are_quoted() -> None:
    assert command_line(["a b", Path("/x"), "$y"]) == "'a b' /x '$y'"
