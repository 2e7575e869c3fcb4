"""ClassAd expressions as HTCondor writes them: what they demand one by one, and whom they name. Pure.

The bindings parse and evaluate expressions, and show nothing of how they are made. So their own text of
one, which is regular, is looked at here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

#: Conjunctions in conjunctions: nobody writes more, and what is deeper is taken as a whole.
DEPTH: Final = 30

_TOKEN: Final = re.compile(
    r"""
    (?P<string> "(?:[^"\\]|\\.)*" )
  | (?P<quoted> '(?:[^'\\]|\\.)*' )
  | (?P<number> \d[\w.]*(?:(?<=[eE])[+-]\d+)? )
  | (?P<word>   [A-Za-z_]\w* )
  | (?P<and>    && )
  | (?P<weak>   \|\| | \? | : )
  | (?P<open>   [(\[{] )
  | (?P<close>  [)\]}] )
  | (?P<space>  \s+ )
  | (?P<other>  . )
    """,
    re.VERBOSE | re.DOTALL,
)
_KEYWORDS: Final = frozenset({"true", "false", "undefined", "error", "is", "isnt", "parent"})
_SCOPES: Final = {"my": "MY", "target": "TARGET"}


class Name(NamedTuple):
    """An attribute that an expression names. scope: ``MY``, ``TARGET`` or ``""``."""

    scope: str
    attribute: str


def conjuncts(text: str, depth: int = DEPTH) -> list[str]:
    """What has to be true each by itself for an expression to be: it, split at its outermost ``&&``."""
    text = _unwrapped(text.strip())
    parts, start, level = [], 0, 0
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        level += (kind == "open") - (kind == "close")
        if level == 0 and kind == "weak":  # binds less than `&&`: this is no conjunction
            return [text]
        if level == 0 and kind == "and":
            parts.append(text[start : token.start()])
            start = token.end()
    if not parts or depth <= 0:
        return [text]
    parts.append(text[start:])
    return [each for part in parts for each in conjuncts(part, depth - 1)]


def _unwrapped(text: str) -> str:
    """Without parentheses around all of it."""
    closes = _closing(text)
    first, last = 0, len(text) - 1
    while first < last and closes.get(first) == last:
        first, last = first + 1, last - 1
        while first < last and text[first].isspace():
            first += 1
        while first < last and text[last].isspace():
            last -= 1
    return text[first : last + 1]


def _closing(text: str) -> dict[int, int]:
    """Where each parenthesis is closed."""
    found, opened = {}, []
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "open":
            opened.append(token.start())
        elif token.lastgroup == "close" and opened:
            start = opened.pop()
            if text[start] == "(":
                found[start] = token.start()
    return found


def usual(text: str) -> str:
    """An expression on one line, with ``=?=`` and ``=!=`` as people write them."""
    operators = {"is": "=?=", "isnt": "=!="}
    found = _TOKEN.finditer(text)
    words = (
        " "
        if token.lastgroup == "space"
        else operators.get(token[0].lower(), token[0])
        if token.lastgroup == "word"
        else token[0]
        for token in found
    )
    return "".join(words).strip()


def attributes(text: str) -> list[Name]:
    """The attributes that an expression names, each once, in their order; functions are none."""
    found: dict[tuple[str, str], Name] = {}
    for name in _named(text):
        found.setdefault((name.scope, name.attribute.lower()), name)
    return list(found.values())


def _named(text: str) -> Iterator[Name]:
    tokens = [token for token in _TOKEN.finditer(text) if token.lastgroup != "space"]
    words = [token[0] for token in tokens]
    for number, token in enumerate(tokens):
        if token.lastgroup != "word" or token[0].lower() in {*_KEYWORDS, *_SCOPES}:
            continue
        if words[number + 1 : number + 2] == ["("]:
            continue
        scope = ""
        if number and words[number - 1] == ".":
            scope = _SCOPES.get(words[number - 2].lower(), "") if number > 1 else ""
            if not scope:  # a part of another attribute
                continue
        yield Name(scope, token[0])
