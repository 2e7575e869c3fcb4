"""Rules on the console: ``console:REGEX``, looked for in lines that a hostile guest writes.

The expression is a user's and the text a guest's; together they can keep a backtracking matcher busy
for years. So each search has a deadline, and all of a run's searches have one together.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

import regex

from vmjobs.model import CONSOLE_RULE

#: Seconds for one line, and for all lines of a run.
LINE_SECONDS = 1.0
ALL_SECONDS = 120.0
#: Bytes of a line that are looked at: its last ones.
LONGEST_LINE = 4096

#: What a terminal takes for a command and not for text (ECMA-48), and other control characters.
_ESCAPES = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movements
    rb"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC and other strings: window titles
    rb"|\x1b[ -/]+[0-~]"  # character sets
    rb"|\x1b[0-~]?"
    rb"|[\x00-\x08\x0b-\x1f\x7f]"
)


class TooSlow(Exception):
    """An expression was not evaluated in time; the text says which."""


@dataclass
class Pattern:
    """One rule.

    line_seconds, all_seconds: how long one search and all of them together may take.

    Raises:
        TooSlow: the expression cannot be compiled by the matcher that has deadlines.
    """

    expression: str
    line_seconds: float = LINE_SECONDS
    all_seconds: float = ALL_SECONDS
    _compiled: regex.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            self._compiled = regex.compile(self.expression)
        except (regex.error, RecursionError, OverflowError) as error:
            raise TooSlow(f"the expression /{self.expression}/ cannot be used: {error}") from error

    def found_in(self, line: str) -> bool:
        """Whether the expression is found in a line.

        Raises:
            TooSlow: time is up, or memory.
        """
        began = time.monotonic()
        seconds = min(self.line_seconds, self.all_seconds)
        try:
            # Other threads go on meanwhile: without this a search holds up the whole agent.
            found = self._compiled.search(line, timeout=seconds, concurrent=True)
        except TimeoutError as error:
            raise TooSlow(
                f"looking for /{self.expression}/ on the console took longer than {seconds:.3g} s; "
                "use a simpler expression"
            ) from error
        except MemoryError as error:
            message = f"looking for /{self.expression}/ on the console takes more memory than there is"
            raise TooSlow(f"{message}; use a simpler expression") from error
        self.all_seconds = max(0.001, self.all_seconds - (time.monotonic() - began))
        return found is not None


def pattern_of(rule: str) -> Pattern | None:
    """The pattern of a rule ``console:REGEX``; ``None`` for any other rule.

    Raises:
        TooSlow: the expression cannot be used.
    """
    expression = rule.removeprefix(CONSOLE_RULE)
    return None if expression == rule else Pattern(expression)


def text_of(line: bytes) -> str:
    """What a person would read of a console line: no escape sequences, no control characters."""
    plain = _ESCAPES.sub(b"", line[-LONGEST_LINE:])
    return plain.decode("utf-8", "replace")
