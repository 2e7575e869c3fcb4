"""What commands print: text from others, errors, progress and log lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import pytest
from rich.progress import Progress

from tests.kit.cli import Run
from tests.kit.waiting import wait_until
from vmjobs.cli import progress
from vmjobs.cli.common import json_option, print_table, shorten_ids
from vmjobs.cli.logs import configure_logging
from vmjobs.cli.progress import byte_bars, step_bars
from vmjobs.errors import Fault, InvalidRequest

#: Sets a terminal's title; looks like markup.
HOSTILE = "\x1b]0;yours\x07 [/red]"


def test_a_table_shows_words_and_obeys_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("NAME", "[WORDS]"), [("a", HOSTILE), ("b", None), ("c", 3), ("d", "one\ntwo")])
    said = capsys.readouterr().out
    assert "\N{REPLACEMENT CHARACTER}]0;yours\N{REPLACEMENT CHARACTER} [/red]" in said
    assert "\x1b]" not in said
    assert "one" in said and "two" in said


def test_a_narrow_terminal_shows_ids_that_tell_rows_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "80")
    ids = [f"01a20b26c3d4{n:020x}" for n in (0, 1, 16**14)]
    ids.append(ids[-1])
    columns = ("JOB", "NAME", "STATE", "EXIT", "NODE", "SUBMITTED", "REASON")
    row = ("muons", "RUNNING", "-", "node-7.long.domain.example", "3 min ago", "PROGRESS")
    print_table(columns, [(each, *row) for each in ids], ids=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("01a2")]
    shown = [line.split()[0] for line in lines]
    assert len(set(shown)) == 3
    assert all(full.startswith(short) for full, short in zip(ids, shown, strict=True))
    assert all("muons" in line and len(line) <= 80 for line in lines)
    monkeypatch.delenv("FORCE_COLOR")
    print_table(columns, [(each, *row) for each in ids], ids=True)
    said = capsys.readouterr().out
    assert all(each in said for each in ids)


def test_a_short_id_has_enough_digits_for_rows_that_are_not_shown() -> None:
    (short,) = shorten_ids(["01a20b26c3d4" + "5" * 20])
    assert short == "01a20b26c3d45555"


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["job", "list"], 77, "UNAUTHENTICATED"),
        (["job", "cancel", "01a20b26c3d4"], 77, "UNAUTHENTICATED"),
        (["image", "list"], 77, "UNAUTHENTICATED"),
        (["job", "list", "--limit", "many"], 2, "USAGE"),
        (["job", "status"], 2, "USAGE"),
        (["run", "--image", "nowhere", "--disk", "1", "/nowhere"], 64, "INVALID_SPEC"),
    ],
)
def test_errors_are_json_where_json_is_asked_for(
    arguments: list[str], status: int, code: str, typed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMJOBS_TOKEN_FILE", "/none")
    done = typed(*arguments, "--json")
    assert (done.code, done.out) == (status, "")
    error = json.loads(done.err)
    assert error["code"] == code
    assert error["message"]
    assert isinstance(error["hint"], str) and isinstance(error["errors"], list)


def test_a_script_may_have_an_option_json(typed: Run) -> None:
    done = typed("run", "--image", "nowhere", "--", "/nowhere", "--json", code=64)
    assert done.err.startswith("vmjobs: cannot read /nowhere")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "--image", "own", "/nowhere"], "cannot read /nowhere: No such file or directory"),
        (["job", "list"], "cannot read a token from /none/token: No such file or directory"),
        (["run", "--image", "Own Image"], "  image: must be like muons:2026 or mygroup/muons:2026"),
        (["run", "--image", "own", "script"], "vmjobs: cannot read script: it is not UTF-8 text ["),
        (["run", "--image", "own", "--input", "../a=script"], "input files: '../a': the path leaves "),
        (["run", "--image", "own", "--cpus", "0"], "  cpus: must be greater than or equal to 1"),
        (["run", "--image", "own", "--output", "a", "--output", "../b"], "  outputs, number 2: "),
    ],
)
def test_an_error_says_what_is_wrong_and_where_in_words(
    arguments: list[str],
    line: str,
    typed: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VMJOBS_TOKEN_FILE", "/none/token")
    (tmp_path / "script").write_bytes(b"\x7fELF\xd0\x00")
    said = typed(*arguments).err
    assert line in said
    assert said.count(line.strip("vmjobs :[")) == 1, "it is said once"
    for internal in ("Errno", "should", "pattern", "outputs.1", "^", "codec", "Traceback"):
        assert internal not in said


def test_an_error_shows_words_and_obeys_none(typed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        faults = [Fault("name", "bad", f"bad: {HOSTILE}")]
        raise InvalidRequest(f"two\nlines {HOSTILE}", faults=faults, hint=HOSTILE)

    monkeypatch.setattr("vmjobs.cli.main.cli.main", fail)
    said = typed().err
    assert said.startswith("vmjobs: two\nlines ")
    assert said.count("yours") == 3
    assert "\x1b" not in said and "\x07" not in said


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


def wait_for_word(word: str, said: Read) -> None:
    wait_until(lambda: word in said(), 10, said)


def test_a_long_transfer_says_how_far_it_is_again_and_again(said: Read) -> None:
    with byte_bars() as shown:
        task = shown.add_task("a\x1b]0;b", total=5_000_000)
        wait_for_word("a\N{REPLACEMENT CHARACTER}]0;b: 0 of 5 MB, 0 s\n", said)
        shown.update(task, completed=2_000_000)
        wait_for_word(": 2 of 5 MB, ", said)
        shown.update(task, completed=5_000_000)
    assert said().count(": 5 of 5 MB, ") == 1


def test_each_step_of_a_long_job_is_told(said: Read) -> None:
    with step_bars() as shown:
        task = shown.add_task("hep: starting", total=1.0)
        wait_for_word("hep: starting: 0%, ", said)
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


LOG = logging.getLogger("vmjobs.test")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers = []  # configure_logging would close them
    yield
    root.handlers = handlers
    root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_says_when_who_what_and_about_what(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO", "json")
    LOG.debug("not said")
    LOG.info("job %s: %s took %.3f s", "ab12", "boot", 1.5)
    (line,) = lines(capsys)
    assert datetime.fromisoformat(line.pop("time")).utcoffset() is not None
    assert line == {
        "level": "INFO",
        "logger": "vmjobs.test",
        "message": "job ab12: boot took 1.500 s",
        "job": "ab12",
    }


@pytest.mark.parametrize(
    ("template", "arguments", "about"),
    [
        ("member %s (%d): %s %s", ("vc-0", 2, "running", "PROGRESS"), {"member": "vc-0"}),
        (
            "refused %s a token for VM %d of the member %s of node %s: %s",
            ("n1", 3, "vc-1", "n2", "no"),
            {"member": "vc-1", "node": "n2"},
        ),
        ("100%% of %-5s; the cluster %s gets no machines", ("a", "vc"), {"cluster": "vc"}),
        ("build %s of %s: %s", ("b1", "hep", "no"), {"build": "b1"}),
        ("evicting the image %s", ("sha256:00",), {"image": "sha256:00"}),
        ("the node failed: %s", ("full",), {}),
        ("a subjob %s", ("x",), {}),
        ("%(job)s in a mapping", ({"job": "x"},), {}),
        ("nothing", (), {}),
    ],
)
def test_what_a_line_is_about(
    template: str, arguments: tuple[Any, ...], about: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("INFO", "json")
    LOG.info(template, *arguments)
    (line,) = lines(capsys)
    assert {k: v for k, v in line.items() if k not in {"time", "level", "logger", "message"}} == about


def test_a_line_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO", "json")
    try:
        raise ValueError("first\nsecond \udcff")
    except ValueError:
        LOG.exception("job %s", 'a"\n}')
    (line,) = lines(capsys)
    assert line["job"] == 'a"\n}'
    assert "Traceback" in line["exception"]
    assert "second" in line["exception"]


def test_people_get_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO")
    LOG.warning("job %s", "ab12")
    assert capsys.readouterr().err.endswith("WARNING vmjobs.test: job ab12\n")
