"""What commands print of others' words."""

from __future__ import annotations

import pytest

from vmjobs.cli.main import main
from vmjobs.cli.support import print_table
from vmjobs.errors import Fault, InvalidRequest

#: Sets a terminal's title; looks like markup.
HOSTILE = "\x1b]0;yours\x07 [/red]"


def test_a_table_shows_words_and_obeys_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("NAME", "[WORDS]"), [("a", HOSTILE), ("b", None), ("c", 3), ("d", "one\ntwo")])
    said = capsys.readouterr().out
    assert "\N{REPLACEMENT CHARACTER}]0;yours\N{REPLACEMENT CHARACTER} [/red]" in said
    assert "\x1b]" not in said
    assert "one" in said and "two" in said


def test_an_error_shows_words_and_obeys_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        faults = [Fault("name", "bad", HOSTILE)]
        raise InvalidRequest(f"two\nlines {HOSTILE}", faults=faults, hint=HOSTILE)

    monkeypatch.setattr("vmjobs.cli.main.cli.main", fail)
    with pytest.raises(SystemExit):
        main([])
    said = capsys.readouterr().err
    assert said.startswith("vmjobs: two\nlines ")
    assert said.count("yours") == 3
    assert "\x1b" not in said and "\x07" not in said
