"""Check a cluster spec's machine attributes and start expression. Pure.

Uses HTCondor's parser where it is installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from typing import Final

from vmjobs.cluster.spec import ClusterSpec
from vmjobs.errors import Fault

#: Attributes of machine and daemon ads that HTCondor sets or uses, in lower case: the manual's list of
#: machine attributes, and others that daemons of 23.9 and 25.14 send.
HTCONDOR_ATTRIBUTES: Final = frozenset(
    (resources.files("condor") / "machine_attributes.txt").read_text("ascii").split()
)
#: More of them, by prefix: a partitionable slot's attributes of its dynamic slots, assigned resources.
_HTCONDOR_PREFIX: Final = re.compile(r"child|assigned|slot\d+_|condor", re.I)
_VMJOBS_PREFIX: Final = re.compile(r"vmjobs|hasvmjobs", re.I)
_LITERAL: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'')
#: Patterns that may not occur outside of literals, and the messages for them.
_FORBIDDEN_PATTERNS: Final = {
    r"[\"']": "a quotation mark is not closed",
    r"^\s*$": "it is empty",
    r"//|/\*": "comments have no place in it",
    r";": "';' has no place in it",
    r"(?<![=<>!?])=(?![=?!])": "'=' assigns; '==' and '=?=' compare",
}
_PAIRS: Final = {")": "(", "]": "[", "}": "{"}


def faults(spec: ClusterSpec) -> list[Fault]:
    """All faults of a spec that HTCondor would reject or misread."""
    return [*_attribute_faults(spec), *_start_faults(spec.start)]


def _attribute_faults(spec: ClusterSpec) -> Iterator[Fault]:
    for name, value in spec.attributes.items():
        field = f"attributes.{name}"
        if _VMJOBS_PREFIX.match(name):
            yield Fault(field, "reserved", f"{name} is reserved for vmjobs; choose another name")
        elif name.lower() in HTCONDOR_ATTRIBUTES or _HTCONDOR_PREFIX.match(name):
            text = f"{name} is HTCondor's own attribute of machines; choose another name"
            yield Fault(field, "reserved", text)
        elif name.lower() in _RESERVED_WORDS:
            yield Fault(field, "reserved", f"{name} is a word of the ClassAd language, not a name")
        if isinstance(value, str) and ("\\" in value or "$$" in value):
            text = f"{name} has a backslash or '$$', which HTCondor's daemons read in different ways"
            yield Fault(field, "bad_value", text)


_RESERVED_WORDS: Final = frozenset(
    ("true", "false", "undefined", "error", "parent", "my", "target", "is", "isnt")
)


def _start_faults(start: str) -> Iterator[Fault]:
    if "$$" in start:
        yield Fault("start", "bad_expression", "start has '$$', which HTCondor reads as a macro")
    elif what := _syntax_fault(start):
        yield Fault("start", "bad_expression", f"start is not a ClassAd expression: {what}")


def _syntax_fault(expression: str) -> str:
    """Why this is no valid expression; empty if no fault is found."""
    if what := _unbalanced(expression):
        return what  # the parser would stop there and ignore the rest
    try:
        import classad2  # noqa: PLC0415  not every host has HTCondor
    except ImportError:
        return ""
    own_error = getattr(classad2, "ClassAdException", ValueError)
    try:
        # In a list, to detect more than one expression.
        parsed = classad2.ExprTree(f"{{ ({expression}) }}")
        if len(parsed.eval()) != 1:
            return "it is more than one"
    except (SyntaxError, ValueError, TypeError, RuntimeError, own_error):
        return "it cannot be parsed"
    return ""


def _unbalanced(expression: str) -> str:
    rest = _LITERAL.sub("0", expression)
    for pattern, what in _FORBIDDEN_PATTERNS.items():
        if re.search(pattern, rest):
            return what
    stack: list[str] = []
    for character in rest:
        if character in _PAIRS.values():
            stack.append(character)
        elif character in _PAIRS and (not stack or stack.pop() != _PAIRS[character]):
            return f"there is a {character!r} that nothing opened"
    return f"a {stack[-1]!r} is not closed" if stack else ""
