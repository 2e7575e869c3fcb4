"""Split ClassAd expressions into clauses and attribute references. Pure.

The bindings parse and evaluate expressions, but give no access to the syntax tree. So this module reads
the text that they print, which is regular.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

#: The deepest nesting of conjunctions that is split, which is deeper than people write.
MAX_DEPTH: Final = 30

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


class AttributeReference(NamedTuple):
    """A reference to an attribute. scope: ``MY``, ``TARGET`` or ``""``."""

    scope: str
    attribute: str


def conjuncts(text: str, depth: int = MAX_DEPTH) -> list[str]:
    """The clauses of an expression: it is split at its outermost ``&&``, repeatedly."""
    text = _unwrapped(text.strip())
    parts, start, level = [], 0, 0
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        level += (kind == "open") - (kind == "close")
        if level == 0 and kind == "weak":  # binds weaker than `&&`: this is no conjunction
            return [text]
        if level == 0 and kind == "and":
            parts.append(text[start : token.start()])
            start = token.end()
    if not parts or depth <= 0:
        return [text]
    parts.append(text[start:])
    return [each for part in parts for each in conjuncts(part, depth - 1)]


def _unwrapped(text: str) -> str:
    """The text without parentheses around all of it."""
    closes = _matching_parentheses(text)
    first, last = 0, len(text) - 1
    while first < last and closes.get(first) == last:
        first, last = first + 1, last - 1
        while first < last and text[first].isspace():
            first += 1
        while first < last and text[last].isspace():
            last -= 1
    return text[first : last + 1]


def _matching_parentheses(text: str) -> dict[int, int]:
    """Positions of opening parentheses, and of those that close them."""
    found, opened = {}, []
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "open":
            opened.append(token.start())
        elif token.lastgroup == "close" and opened:
            start = opened.pop()
            if text[start] == "(":
                found[start] = token.start()
    return found


def format_expression(text: str) -> str:
    """An expression on one line, with ``=?=`` and ``=!=`` as people write them."""
    operators = {"is": "=?=", "isnt": "=!="}

    def shown(token: re.Match[str]) -> str:
        return " " if token.lastgroup == "space" else operators.get(token[0].lower(), token[0])

    return _TOKEN.sub(shown, text).strip()


def attribute_references(text: str) -> list[AttributeReference]:
    """The attributes in an expression, each once, in their order, without function names."""
    found: dict[tuple[str, str], AttributeReference] = {}
    for name in _iterate_references(text):
        found.setdefault((name.scope, name.attribute.lower()), name)
    return list(found.values())


def _iterate_references(text: str) -> Iterator[AttributeReference]:
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
        yield AttributeReference(scope, token[0])
