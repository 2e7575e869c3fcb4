"""The serial console as a source of facts: sentinel lines, rules, a kernel panic, the last lines."""

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
#: Its last words where it does not restart the machine after that.
_HALTED = b"---[ end Kernel panic - not syncing"
_HALTED_END = b"]---"
#: Characters of the cause of a panic that are told.
LONGEST_CAUSE = 1024
#: Seconds after which an unfinished line is one that waits for somebody: a prompt.
PROMPT_SECONDS = 1.0


@dataclass
class ConsoleReader:
    """Reads a growing console log and finds this run's sentinel lines in it.

    rules: patterns by name; each is told of once, when a line fits it. Lines are complete, but a
        prompt counts for the rule ``ready``, and what a machine said last is complete at its end.
    """

    path: Path
    sentinel: str
    rules: dict[str, Pattern] = field(default_factory=dict)
    offset: int = 0
    _rest: bytes = b""
    _grew: float = field(default_factory=time.monotonic)
    exit: ExitStatus | None = field(default=None)

    def read(self) -> list[Observation]:
        """What is new since the last call, as observations."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self.offset:
                    self.offset = 0  # it was emptied, and began anew
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
        """The machine is gone: nothing will be added to its last line."""
        last, self._rest = self._rest, b""
        return list(self._fitting(last, tuple(self.rules))) if last else []

    def size(self) -> int:
        """How many bytes the console has by now."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def prompts(self) -> bool:
        """Whether a line has begun that may turn out to be a prompt."""
        return bool(self._rest) and "ready" in self.rules and self._grew < float("inf")

    @property
    def place(self) -> int:
        """Up to where all lines have been looked at: who goes on there misses none."""
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
        # The kernel may write in the middle of a line; the nonce is what makes it ours.
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
    """The cause that a kernel gives in its last words; ``None`` where the line has none.

    In time linear in the line, which is a guest's and may be megabytes long: an expression that
    looks for both ends tries each beginning with all of the rest, while every other job waits.
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
    """What the kernel said when it panicked; None if the end of the console tells of no panic."""
    found = PANIC.search(_tail(path, 4 * LAST_BYTES))
    return _visible(found.group(1).decode("utf-8", "replace").strip()) if found else None


def last_lines(path: Path, count: int = LAST_LINES) -> str:
    """The console's last lines, with anything unprintable made visible."""
    lines = _tail(path, LAST_BYTES).decode("utf-8", "replace").splitlines()[-count:]
    return "\n".join(map(_visible, lines))


def _visible(line: str) -> str:
    """A line of a console without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in line)
