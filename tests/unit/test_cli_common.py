"""How commands print text from others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.cli import Run
from vmjobs.cli.common import print_table, shorten_ids
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
    done = typed("run", "--image", "nowhere", "--", "/nowhere", "--json")
    assert done.code == 64
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
