"""Rules on the console: what counts as a line, and that no expression holds up the agent."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from waiting_kit import wait_for

from vmjobs.agent import console as console_module
from vmjobs.agent.console import ConsoleReader
from vmjobs.agent.inbox import ExitReported, LineSeen, Observation, Panicked, RuleFailed
from vmjobs.agent.patterns import LONGEST_LINE, Pattern, TooSlow, pattern_of, text_of


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"plain\r", "plain"),
        (b"\x1b[1;31mred\x1b[0m and \x1b[2Kmore", "red and more"),
        (b"\x1b]0;a window's title\x07text", "text"),
        (b"\x1b]0;another\x1b\\text", "text"),
        (b"\x1b(Bcharset\x1b=", "charset"),
        (b"bell\x07 back\x08space \x7f", "bell backspace "),
        (b"a\ttab", "a\ttab"),
        ("übersetzt".encode(), "übersetzt"),
        (b"latin-1: \xfc", "latin-1: �"),
        (b"\x1b", ""),
        (b"cut \x1b[", "cut "),
        (b"x" * 100_000 + b"end", "x" * (LONGEST_LINE - 3) + "end"),
    ],
)
def test_what_a_person_would_read(line: bytes, text: str) -> None:
    assert text_of(line) == text


def test_escape_sequences_cannot_take_time() -> None:
    began = time.monotonic()
    for start in (b"\x1b]", b"\x1b[", b"\x1b(", b"\x1bP"):
        text_of(start * 200_000)
    assert time.monotonic() - began < 2


def test_only_console_rules_have_patterns() -> None:
    assert pattern_of("report") is None
    assert pattern_of("poweroff") is None
    found = pattern_of("console:^done$")
    assert found is not None
    assert found.found_in("done")
    assert not found.found_in("not done")


def test_a_catastrophic_expression_has_a_deadline() -> None:
    pattern = Pattern(r"(a|aa|aaa)+$", line_seconds=0.3)
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.01):
            ticks += 1

    other = threading.Thread(target=tick, daemon=True)
    other.start()
    began = time.monotonic()
    try:
        with pytest.raises(TooSlow, match=r"took longer than 0\.3 s"):
            pattern.found_in("a" * 200 + " b")
    finally:
        stop.set()
        other.join()
    assert time.monotonic() - began < 5
    assert ticks >= 3, "other threads go on meanwhile"


def test_all_lines_together_have_a_deadline() -> None:
    pattern = Pattern(r"(a|aa|aaa)+$", line_seconds=0.2, all_seconds=0.5)
    with pytest.raises(TooSlow):
        for length in range(20, 200):
            assert not pattern.found_in("a" * length + "b")


def test_an_expression_that_only_one_matcher_takes() -> None:
    with pytest.raises(TooSlow, match="cannot be used"):
        Pattern(r"(?P<x>a)(?P=y)")


def reader(path: Path, printed: bytes, **rules: str) -> ConsoleReader:
    path.write_bytes(printed)
    return ConsoleReader(path, "abc", {name: Pattern(text) for name, text in rules.items()})


def test_a_rule_is_told_of_once_and_only_for_complete_lines(path: Path) -> None:
    seen = reader(path, b"\x1b[32mall done", exit="^all done$")
    assert seen.read() == []
    with path.open("ab") as file:
        file.write(b"\x1b[0m\r\nall done\r\n")
    assert seen.read() == [LineSeen("exit", "all done")]
    with path.open("ab") as file:
        file.write(b"all done\n")
    assert seen.read() == []


def test_what_came_last_is_a_line_once_the_machine_is_gone(path: Path) -> None:
    seen = reader(path, b"first\nall done", exit="^all done$")
    assert seen.read() == []
    assert seen.finish() == [LineSeen("exit", "all done")]
    assert seen.finish() == []


def test_half_a_sentinel_line_is_never_taken(path: Path) -> None:
    """It may be the beginning of ``code=137``."""
    seen = reader(path, b"vmjobs:abc:exit code=1")
    assert seen.read() + seen.finish() == []
    with path.open("ab") as file:
        file.write(b"\nvmjobs:abc:exit code=137\n")
    (told,) = seen.read()
    assert isinstance(told, ExitReported)
    assert told.exit.code == 137


def test_a_prompt_counts_for_readiness_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "PROMPT_SECONDS", 0.05)
    seen = reader(path, b"Debian GNU/Linux\n\nguest login: ", ready="login:", exit="login:")
    assert seen.read() == []
    told: list[Observation] = []
    wait_for(lambda: told.extend(seen.read()) or told)
    assert told == [LineSeen("ready", "guest login: ")]
    assert seen.read() == []


def test_one_line_may_fit_both_rules(path: Path) -> None:
    assert reader(path, b"up and done\n", ready="up", exit="done").read() == [
        LineSeen("ready", "up and done"),
        LineSeen("exit", "up and done"),
    ]


def test_a_rule_that_cannot_be_evaluated_ends_the_search(path: Path) -> None:
    path.write_bytes(b"a" * 200 + b" b\n" + b"done\n" * 10)
    seen = ConsoleReader(path, "abc", {"exit": Pattern("(a|aa|aaa)+$", line_seconds=0.1)})
    (told,) = seen.read()
    assert isinstance(told, RuleFailed)
    assert "use a simpler expression" in told.why


def test_a_kernel_that_halts_after_its_panic(path: Path) -> None:
    panic = b"Kernel panic - not syncing: VFS: no root"
    printed = b"[ 3.0] %s\r\n[ 3.1] ---[ end %s ]---\r\n" % (panic, panic)
    assert reader(path, printed).read() == [Panicked("VFS: no root")]


def test_last_words_of_a_kernel_cannot_take_time(path: Path) -> None:
    began = time.monotonic()
    assert reader(path, b"---[ end Kernel panic - not syncing" * 50_000 + b"\n").read() == []
    assert time.monotonic() - began < 5
