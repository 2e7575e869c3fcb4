"""Console rules: what counts as a line, and that no expression holds up the agent."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.kit.waiting import wait_until
from vmjobs.agent.vm import console as console_module
from vmjobs.agent.vm.console import ConsoleReader
from vmjobs.agent.vm.console_rules import (
    MAX_LINE_BYTES,
    ConsoleRule,
    ConsoleRuleError,
    parse_console_rule,
    plain_text,
)
from vmjobs.agent.vm.events import (
    ConsoleLineMatched,
    ExitReported,
    KernelPanicked,
    RuleFailed,
    RunEvent,
)


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
        (b"x" * 100_000 + b"end", "x" * (MAX_LINE_BYTES - 3) + "end"),
    ],
)
def test_what_a_person_would_read(line: bytes, text: str) -> None:
    assert plain_text(line) == text


def test_escape_sequences_cannot_take_time() -> None:
    began = time.monotonic()
    for start in (b"\x1b]", b"\x1b[", b"\x1b(", b"\x1bP"):
        plain_text(start * 200_000)
    assert time.monotonic() - began < 2


def test_only_console_rules_have_patterns() -> None:
    assert parse_console_rule("report") is None
    assert parse_console_rule("poweroff") is None
    found = parse_console_rule("console:^done$")
    assert found.matches("done")
    assert not found.matches("not done")


def test_a_catastrophic_expression_has_a_deadline() -> None:
    pattern = ConsoleRule(r"(a|aa|aaa)+$", line_seconds=0.3)
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
        with pytest.raises(ConsoleRuleError, match=r"took longer than 0\.3 s"):
            pattern.matches("a" * 200 + " b")
    finally:
        stop.set()
        other.join()
    assert time.monotonic() - began < 5
    assert ticks >= 3, "other threads go on meanwhile"


def test_all_lines_together_have_a_deadline() -> None:
    pattern = ConsoleRule(r"(a|aa|aaa)+$", line_seconds=0.2, run_seconds=0.5)
    with pytest.raises(ConsoleRuleError):
        for length in range(20, 200):
            assert not pattern.matches("a" * length + "b")


def test_an_expression_that_only_one_matcher_takes() -> None:
    with pytest.raises(ConsoleRuleError, match="cannot be used"):
        ConsoleRule(r"(?P<x>a)(?P=y)")


def reader(path: Path, printed: bytes, **rules: str) -> ConsoleReader:
    path.write_bytes(printed)
    return ConsoleReader(path, "abc", {name: ConsoleRule(text) for name, text in rules.items()})


def test_a_rule_is_told_of_once_and_only_for_complete_lines(path: Path) -> None:
    seen = reader(path, b"\x1b[32mall done", exit="^all done$")
    assert seen.read() == []
    with path.open("ab") as file:
        file.write(b"\x1b[0m\r\nall done\r\n")
    assert seen.read() == [ConsoleLineMatched("exit", "all done")]
    with path.open("ab") as file:
        file.write(b"all done\n")
    assert seen.read() == []


def test_what_came_last_is_a_line_once_the_vm_is_gone(path: Path) -> None:
    seen = reader(path, b"first\nall done", exit="^all done$")
    assert seen.read() == []
    assert seen.finish() == [ConsoleLineMatched("exit", "all done")]
    assert seen.finish() == []


def test_half_a_sentinel_line_is_never_taken(path: Path) -> None:
    """``code=1`` may be the beginning of ``code=137``."""
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
    told: list[RunEvent] = []
    wait_until(lambda: told.extend(seen.read()) or told)
    assert told == [ConsoleLineMatched("ready", "guest login: ")]
    assert seen.read() == []


def test_one_line_may_fit_both_rules(path: Path) -> None:
    assert reader(path, b"up and done\n", ready="up", exit="done").read() == [
        ConsoleLineMatched("ready", "up and done"),
        ConsoleLineMatched("exit", "up and done"),
    ]


def test_a_rule_that_cannot_be_evaluated_ends_the_search(path: Path) -> None:
    path.write_bytes(b"a" * 200 + b" b\n" + b"done\n" * 10)
    seen = ConsoleReader(path, "abc", {"exit": ConsoleRule("(a|aa|aaa)+$", line_seconds=0.1)})
    (told,) = seen.read()
    assert isinstance(told, RuleFailed)
    assert "use a simpler expression" in told.why


def test_a_kernel_that_halts_after_its_panic(path: Path) -> None:
    panic = b"Kernel panic - not syncing: VFS: no root"
    printed = b"[ 3.0] %s\r\n[ 3.1] ---[ end %s ]---\r\n" % (panic, panic)
    assert reader(path, printed).read() == [KernelPanicked("VFS: no root")]


def test_last_words_of_a_kernel_cannot_take_time(path: Path) -> None:
    began = time.monotonic()
    assert reader(path, b"---[ end Kernel panic - not syncing" * 50_000 + b"\n").read() == []
    assert time.monotonic() - began < 5
