"""The one function that runs other programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.waiting import wait_until
from vmjobs.errors import HypervisorError, VMJobsError
from vmjobs.subprocess import run


def test_output_and_status() -> None:
    done = run(["sh", "-c", "cat; echo out; echo oops >&2; exit 3"], timeout=10, check=False)
    assert (done.stdout, done.stderr, done.returncode, done.text) == (b"out\n", b"oops\n", 3, "out\n")


def test_a_failure_reads_as_a_command() -> None:
    with pytest.raises(HypervisorError) as caught:
        run(["sh", "-c", "echo no luck >&2; exit 2"], timeout=10, error=HypervisorError)
    assert caught.value.message == "exit status 2: sh -c 'echo no luck >&2; exit 2': no luck"


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(VMJobsError, match="cannot run: no-such-program -x: No such file"):
        run([Path("no-such-program"), "-x"], timeout=10)


@pytest.mark.parametrize("check_cancelled", [None, lambda: None])
def test_a_deadline_ends_what_was_started_too(
    path: Path, check_cancelled: Callable[[], None] | None
) -> None:
    began = time.monotonic()
    with pytest.raises(VMJobsError, match=r"timed out after 1 s: sh -c"):
        run(
            ["sh", "-c", f"sleep 60 & echo $! >{path}; wait"],
            timeout=1,
            check_cancelled=check_cancelled,
        )
    assert time.monotonic() - began < 10
    until_gone(path.read_text().strip())


def until_gone(pid: str) -> None:
    """Wait until a process has ended."""
    status = Path("/proc") / pid / "stat"
    wait_until(lambda: not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z")


def test_a_program_that_is_not_wanted_any_more(tmp_path: Path) -> None:
    note, asked = tmp_path / "pid", []

    def check_cancelled() -> None:
        asked.append(note.read_text().strip())
        if len(asked) == 2:
            raise Unwanted

    began = time.monotonic()
    with pytest.raises(Unwanted):
        run(
            ["sh", "-c", f"sleep 60 & echo $! >{note}; wait"],
            timeout=50,
            check_cancelled=check_cancelled,
        )
    assert time.monotonic() - began < 10
    until_gone(asked[0])


class Unwanted(Exception):
    """Raised by a test's ``check_cancelled``."""


def test_a_program_that_no_signal_reaches_can_tell_that_it_is_not_wanted(tmp_path: Path) -> None:
    # A signal does not reach a program of another user, or one that left the session.
    work = f"echo begun >{tmp_path}/begun; cat; echo told >{tmp_path}/told"
    script = f"exec 3<&0; setsid sh -c '{work}' <&3 & wait"

    def check_cancelled() -> None:
        if (tmp_path / "begun").exists():
            raise Unwanted

    with pytest.raises(Unwanted):
        run(["sh", "-c", script], timeout=50, check_cancelled=check_cancelled)
    wait_until((tmp_path / "told").exists)


@pytest.mark.slow
def test_output_where_somebody_waits() -> None:
    looks: list[None] = []
    script = "for n in 1 2 3; do head -c 100000 /dev/zero; sleep 0.7; done; echo no >&2"
    done = run(["sh", "-c", script], timeout=30, check_cancelled=lambda: looks.append(None))
    assert (len(done.stdout), done.stderr) == (300_000, b"no\n")
    assert looks


def test_open_files_that_are_passed_on(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        run(
            ["sh", "-c", f"echo here >/proc/self/fd/{file.fileno()}"],
            timeout=10,
            inherit=(file.fileno(),),
        )
    assert (tmp_path / "file").read_bytes() == b"here\n"


def test_secrets_do_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    text = run(["env"], timeout=10, env={"WANTED": "1"}).text
    assert "SOME_TOKEN" not in text
    assert "WANTED=1" in text
    assert "PATH=" in text
