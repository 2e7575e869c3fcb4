"""Progress lines of long steps, without a terminal."""

from __future__ import annotations

from collections.abc import Callable

import click
import pytest
from rich.progress import Progress

from tests.kit.waiting import wait_until
from vmjobs.cli import progress
from vmjobs.cli.common import json_option
from vmjobs.cli.progress import byte_bars, step_bars

Read = Callable[[], str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Read:
    """Return all of standard error so far; every step that takes time counts as long."""
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 0.01)
    monkeypatch.setattr(progress, "NEXT_LINE_SECONDS", 0.01)
    lines: list[str] = []

    def read() -> str:
        lines.append(capsys.readouterr().err)
        return "".join(lines)

    return read


def wait_for(word: str, said: Read) -> None:
    wait_until(lambda: word in said(), 10, said)


def test_a_long_transfer_says_how_far_it_is_again_and_again(said: Read) -> None:
    with byte_bars() as shown:
        task = shown.add_task("a\x1b]0;b", total=5_000_000)
        wait_for("a\N{REPLACEMENT CHARACTER}]0;b: 0 of 5 MB, 0 s\n", said)
        shown.update(task, completed=2_000_000)
        wait_for(": 2 of 5 MB, ", said)
        shown.update(task, completed=5_000_000)
    assert said().count(": 5 of 5 MB, ") == 1


def test_each_step_of_a_long_job_is_told(said: Read) -> None:
    with step_bars() as shown:
        task = shown.add_task("hep: starting", total=1.0)
        wait_for("hep: starting: 0%, ", said)
        shown.update(task, description="hep: kernel", completed=0.5)
        shown.update(task, description="hep: done", completed=1.0)
    assert "hep: kernel: 50%, " in said()
    assert "hep: done: 100%, " in said()


@pytest.mark.parametrize("bars", [byte_bars, step_bars])
def test_what_is_done_at_once_says_nothing(
    bars: Callable[[], Progress], capsys: pytest.CaptureFixture[str]
) -> None:
    with bars() as shown:
        shown.update(shown.add_task("quick", total=1.0), description="quick: done", completed=1.0)
    assert capsys.readouterr().err == ""


def test_programs_that_read_json_are_told_nothing(said: Read) -> None:
    @click.command()
    @json_option
    def command(as_json: bool) -> None:
        with byte_bars() as shown:
            shown.add_task("x", total=5)
            assert not shown._timer.is_alive()  # type: ignore[attr-defined]

    command.main(["--json"], standalone_mode=False)
    assert said() == ""
