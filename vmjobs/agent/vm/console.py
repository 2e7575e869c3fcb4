"""Reads a VM's serial console: sentinels, lines that match rules, panics, last lines."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vmjobs.agent.vm.console_rules import MAX_LINE_BYTES, ConsoleRule, ConsoleRuleError, plain_text
from vmjobs.agent.vm.events import (
    ConsoleLineMatched,
    GuestReady,
    KernelPanicked,
    RuleFailed,
    RunEvent,
    parse_exit_report,
)
from vmjobs.model import ExitChannel

LAST_LINES = 20
TAIL_BYTES = 16 * 1024
READ_BYTES = 4 * 1024 * 1024
#: The text with which every Linux kernel announces that it gives up (kernel/panic.c).
PANIC = re.compile(rb"Kernel panic - not syncing: ?([^\r\n]*)")
#: The last line of a kernel that panics and does not restart the VM.
_HALT_START = b"---[ end Kernel panic - not syncing"
_HALT_END = b"]---"
#: The most characters that are reported of a panic's cause.
MAX_CAUSE = 1024
#: Seconds after which an unfinished line counts as a prompt.
PROMPT_SECONDS = 1.0


@dataclass
class ConsoleReader:
    """Reads a growing console log and finds this run's sentinel lines in it.

    rules: patterns by name; each is reported once, when a line matches it. Only complete lines are
        matched, except that a prompt can match the rule ``ready``, and the last line of a VM that
        has ended can match any rule.
    """

    path: Path
    sentinel: str
    rules: dict[str, ConsoleRule] = field(default_factory=dict)
    offset: int = 0
    _rest: bytes = b""
    _last_growth: float = field(default_factory=time.monotonic)

    def read(self) -> list[RunEvent]:
        """Return the events since the last call."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self.offset:
                    self.offset = 0  # the file was truncated
                file.seek(self.offset)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return []
        if not data:
            return self._prompt_events()
        self._last_growth = time.monotonic()
        self.offset += len(data)
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-MAX_LINE_BYTES:]
        return [seen for line in lines for seen in self._line_events(line)]

    def finish(self) -> list[RunEvent]:
        """Return the events of an unfinished last line, once the VM has ended."""
        last, self._rest = self._rest, b""
        return list(self._matching_rules(last, tuple(self.rules))) if last else []

    def size(self) -> int:
        """Return the console's present size in bytes."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def may_show_prompt(self) -> bool:
        """Whether the console ends with an unfinished line that may be a prompt."""
        return bool(self._rest) and "ready" in self.rules and self._last_growth < float("inf")

    @property
    def resume_offset(self) -> int:
        """Offset of the first line that has not been processed: reading resumes there."""
        return self.offset - len(self._rest)

    def _line_events(self, line: bytes) -> Iterator[RunEvent]:
        if (seen := self._sentinel_event(line)) is not None:
            yield seen
        if (cause := halt_cause(line)) is not None:
            yield KernelPanicked(cause)
        yield from self._matching_rules(line, tuple(self.rules))

    def _prompt_events(self) -> list[RunEvent]:
        if not self._rest or time.monotonic() - self._last_growth < PROMPT_SECONDS:
            return []
        self._last_growth = float("inf")  # once is enough
        return list(self._matching_rules(self._rest, ("ready",)))

    def _matching_rules(self, line: bytes, names: tuple[str, ...]) -> Iterator[RunEvent]:
        if not self.rules:
            return
        text = plain_text(line)
        for name in names:
            pattern = self.rules.get(name)
            try:
                if pattern is not None and pattern.matches(text):
                    del self.rules[name]
                    yield ConsoleLineMatched(name, text)
            except ConsoleRuleError as slow:
                self.rules.clear()
                yield RuleFailed(str(slow))
                return

    def _sentinel_event(self, line: bytes) -> RunEvent | None:
        # The kernel may write in the middle of a line, so the sentinel may be anywhere in it.
        text = line.strip(b"\r ").decode("ascii", "replace")
        _, mark, said = text.partition(f"vmjobs:{self.sentinel}:")
        if not mark:
            return None
        word, _, rest = said.partition(" ")
        if word == "ready":
            return GuestReady()
        return parse_exit_report(word, rest, ExitChannel.CONSOLE)


def halt_cause(line: bytes) -> str | None:
    """Return the cause in a panicking kernel's last line; ``None`` for other lines.

    Takes time linear in the line, which comes from a guest and may be megabytes long. A regular
    expression for both ends takes quadratic time, while every other job waits.
    """
    _, begun, rest = line.partition(_HALT_START)
    cause, ended, _ = rest.partition(_HALT_END)
    if not (begun and ended) or b"\r" in cause:
        return None
    return cause.removeprefix(b":").strip()[:MAX_CAUSE].decode("utf-8", "replace")


def _tail(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read()
    except FileNotFoundError:
        return b""


def panic_text(path: Path) -> str | None:
    """Return the kernel's panic message; None if the end of the console has none."""
    found = PANIC.search(_tail(path, 4 * TAIL_BYTES))
    return _printable(found.group(1).decode("utf-8", "replace").strip()) if found else None


def with_last_lines(message: str, path: Path, count: int = LAST_LINES) -> str:
    """Return a message with the console's last lines; ``?`` stands for unprintable characters."""
    lines = _tail(path, TAIL_BYTES).decode("utf-8", "replace").splitlines()[-count:]
    shown = "\n".join(map(_printable, lines))
    return f"{message}; the console's last lines:\n{shown}" if shown else message


def _printable(line: str) -> str:
    """Return the line without characters that control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in line)
