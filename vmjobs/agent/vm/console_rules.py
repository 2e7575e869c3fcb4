"""Console rules, ``console:REGEX``, searched in console lines of a hostile guest.

The user writes the expression and the guest the text; together they can keep a backtracking matcher
busy for years. So each search has a deadline, and all searches of a run share another one.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

import regex

from vmjobs.model import CONSOLE_RULE

#: Seconds for one line, and for all lines of a run.
LINE_SEARCH_SECONDS = 1.0
RUN_SEARCH_SECONDS = 120.0
#: Bytes at the end of a line that are searched.
MAX_LINE_BYTES = 4096

#: Terminal control sequences (ECMA-48) and other control characters.
_ESCAPES = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movements
    rb"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC and other strings: window titles
    rb"|\x1b[ -/]+[0-~]"  # character sets
    rb"|\x1b[0-~]?"
    rb"|[\x00-\x08\x0b-\x1f\x7f]"
)


class ConsoleRuleError(Exception):
    """An expression is invalid, or its search exceeded time or memory; the text names it."""


@dataclass
class ConsoleRule:
    """One rule's expression.

    line_seconds, run_seconds: time limits of one search and of all searches together.

    Raises:
        ConsoleRuleError: the ``regex`` module, whose searches have deadlines, cannot compile it.
    """

    expression: str
    line_seconds: float = LINE_SEARCH_SECONDS
    run_seconds: float = RUN_SEARCH_SECONDS
    _compiled: regex.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            self._compiled = regex.compile(self.expression)
        except (regex.error, RecursionError, OverflowError) as error:
            raise ConsoleRuleError(
                f"the expression /{self.expression}/ cannot be used: {error}"
            ) from error

    def matches(self, line: str) -> bool:
        """Whether the line contains a match.

        Raises:
            ConsoleRuleError: the search ran out of time or memory.
        """
        began = time.monotonic()
        seconds = min(self.line_seconds, self.run_seconds)
        try:
            # concurrent: releases the GIL, without which a search blocks the whole agent.
            found = self._compiled.search(line, timeout=seconds, concurrent=True)
        except TimeoutError as error:
            raise ConsoleRuleError(
                f"searching the console for /{self.expression}/ took longer than {seconds:.3g} s; "
                "use a simpler expression"
            ) from error
        except MemoryError as error:
            message = f"searching the console for /{self.expression}/ ran out of memory"
            raise ConsoleRuleError(f"{message}; use a simpler expression") from error
        self.run_seconds = max(0.001, self.run_seconds - (time.monotonic() - began))
        return found is not None


def parse_console_rule(rule: str) -> ConsoleRule | None:
    """Return the console rule of ``console:REGEX``; ``None`` for any other rule.

    Raises:
        ConsoleRuleError: the expression cannot be used.
    """
    expression = rule.removeprefix(CONSOLE_RULE)
    return None if expression == rule else ConsoleRule(expression)


def plain_text(line: bytes) -> str:
    """Return a console line's last bytes as text, without escapes and control characters."""
    plain = _ESCAPES.sub(b"", line[-MAX_LINE_BYTES:])
    return plain.decode("utf-8", "replace")
