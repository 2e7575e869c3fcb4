"""The serial console as a source of facts: sentinel lines, a kernel panic, the last lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from vmjobs.agent.inbox import ExitReported, Observation, Ready, ScriptEnded
from vmjobs.model import ExitChannel, ExitStatus

LAST_LINES = 20
LAST_BYTES = 16 * 1024
READ_AT_ONCE = 4 * 1024 * 1024
LONGEST_LINE = 4096
#: The text with which every Linux kernel announces that it gives up (kernel/panic.c).
PANIC = re.compile(rb"Kernel panic - not syncing: ?([^\r\n]*)")


@dataclass
class ConsoleReader:
    """Reads a growing console log and finds this run's sentinel lines in it."""

    path: Path
    sentinel: str
    offset: int = 0
    _rest: bytes = b""
    exit: ExitStatus | None = field(default=None)

    def read(self) -> list[Observation]:
        """What is new since the last call, as observations."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(READ_AT_ONCE)
        except FileNotFoundError:
            return []
        self.offset += len(data)
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-LONGEST_LINE:]
        return [seen for line in lines if (seen := self._sentinel_line(line)) is not None]

    def size(self) -> int:
        """How many bytes the console has by now."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

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
            return ExitReported(ended)
        return None


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
    return found.group(1).decode("utf-8", "replace").strip() if found else None


def last_lines(path: Path, count: int = LAST_LINES) -> str:
    """The console's last lines, with anything unprintable made visible."""
    lines = _tail(path, LAST_BYTES).decode("utf-8", "replace").splitlines()[-count:]
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)
