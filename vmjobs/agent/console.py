"""Reads a VM's serial console: sentinels, lines that match rules, panics, last lines."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vmjobs.agent.inbox import (
    ExitReported,
    LineSeen,
    Observation,
    Panicked,
    Ready,
    RuleFailed,
    ScriptEnded,
)
from vmjobs.agent.patterns import LONGEST_LINE, Pattern, TooSlow, text_of
from vmjobs.model import ExitChannel, ExitStatus

LAST_LINES = 20
LAST_BYTES = 16 * 1024
READ_AT_ONCE = 4 * 1024 * 1024
#: The text with which every Linux kernel announces that it gives up (kernel/panic.c).
PANIC = re.compile(rb"Kernel panic - not syncing: ?([^\r\n]*)")
#: The last line of a kernel that panics and does not restart the VM.
_HALTED = b"---[ end Kernel panic - not syncing"
_HALTED_END = b"]---"
#: The most characters that are reported of a panic's cause.
LONGEST_CAUSE = 1024
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
    rules: dict[str, Pattern] = field(default_factory=dict)
    offset: int = 0
    _rest: bytes = b""
    _grew: float = field(default_factory=time.monotonic)
    exit: ExitStatus | None = field(default=None)

    def read(self) -> list[Observation]:
        """Return the events since the last call."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self.offset:
                    self.offset = 0  # the file was truncated
                file.seek(self.offset)
                data = file.read(READ_AT_ONCE)
        except FileNotFoundError:
            return []
        if not data:
            return self._prompt()
        self._grew = time.monotonic()
        self.offset += len(data)
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-LONGEST_LINE:]
        return [seen for line in lines for seen in self._look_at(line)]

    def finish(self) -> list[Observation]:
        """Return the events of an unfinished last line, once the VM has ended."""
        last, self._rest = self._rest, b""
        return list(self._fitting(last, tuple(self.rules))) if last else []

    def size(self) -> int:
        """Return the console's present size in bytes."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def prompts(self) -> bool:
        """Whether the console ends with an unfinished line that may be a prompt."""
        return bool(self._rest) and "ready" in self.rules and self._grew < float("inf")

    @property
    def place(self) -> int:
        """Offset of the first line that has not been processed: reading resumes there."""
        return self.offset - len(self._rest)

    def _look_at(self, line: bytes) -> Iterator[Observation]:
        if (seen := self._sentinel_line(line)) is not None:
            yield seen
        if (cause := halted(line)) is not None:
            yield Panicked(cause)
        yield from self._fitting(line, tuple(self.rules))

    def _prompt(self) -> list[Observation]:
        if not self._rest or time.monotonic() - self._grew < PROMPT_SECONDS:
            return []
        self._grew = float("inf")  # once is enough
        return list(self._fitting(self._rest, ("ready",)))

    def _fitting(self, line: bytes, names: tuple[str, ...]) -> Iterator[Observation]:
        if not self.rules:
            return
        text = text_of(line)
        for name in names:
            pattern = self.rules.get(name)
            try:
                if pattern is not None and pattern.found_in(text):
                    del self.rules[name]
                    yield LineSeen(name, text)
            except TooSlow as slow:
                self.rules.clear()
                yield RuleFailed(str(slow))
                return

    def _sentinel_line(self, line: bytes) -> Observation | None:
        # The kernel may write in the middle of a line, so the sentinel may be anywhere in it.
        text = line.strip(b"\r ").decode("ascii", "replace")
        _, mark, said = text.partition(f"vmjobs:{self.sentinel}:")
        if not mark:
            return None
        word, _, rest = said.partition(" ")
        if word == "ready":
            return Ready()
        ended = _exit_status(rest)
        if ended is None:
            return None
        if word == "collecting":
            return ScriptEnded(ended, disk_full="disk=full" in rest.split())
        if word == "exit":
            self.exit = ended
            return ExitReported(ended, undelivered="undelivered=yes" in rest.split())
        return None


def halted(line: bytes) -> str | None:
    """Return the cause in a panicking kernel's last line; ``None`` for other lines.

    Takes time linear in the line, which comes from a guest and may be megabytes long. A regular
    expression for both ends takes quadratic time, while every other job waits.
    """
    _, begun, rest = line.partition(_HALTED)
    cause, ended, _ = rest.partition(_HALTED_END)
    if not (begun and ended) or b"\r" in cause:
        return None
    return cause.removeprefix(b":").strip()[:LONGEST_CAUSE].decode("utf-8", "replace")


def _exit_status(text: str) -> ExitStatus | None:
    words = dict(word.split("=", 1) for word in text.split() if "=" in word)
    try:
        if "signal" in words:
            return ExitStatus(signal=int(words["signal"]), channel=ExitChannel.CONSOLE)
        return ExitStatus(code=int(words["code"]), channel=ExitChannel.CONSOLE)
    except (KeyError, ValueError):
        return None


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
    found = PANIC.search(_tail(path, 4 * LAST_BYTES))
    return _visible(found.group(1).decode("utf-8", "replace").strip()) if found else None


def last_lines(path: Path, count: int = LAST_LINES) -> str:
    """Return the console's last lines, with unprintable characters replaced by ``?``."""
    lines = _tail(path, LAST_BYTES).decode("utf-8", "replace").splitlines()[-count:]
    return "\n".join(map(_visible, lines))


def _visible(line: str) -> str:
    """Return the line without characters that control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in line)
