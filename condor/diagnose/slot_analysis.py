"""Find the requirements that keep a job and the nodes of a pool from matching.

Part of :mod:`condor.daemon_call`: it evaluates ads, does no I/O, and imports nothing from vmjobs. Ads
are untrusted input: the results have bounded lengths and numbers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import classad2

from condor import names
from condor.expressions import attribute_references, conjuncts, format_expression
from condor.pool.idle_jobs import with_full_capacity

#: Limits of a result: characters of an expression and of a value; nodes, values, and attributes of a
#: clause that are listed.
MAX_TEXT_LENGTH, MAX_VALUE_LENGTH, MAX_NODE_NAMES, MAX_VALUES, MAX_ATTRIBUTES = 400, 80, 5, 4, 12
#: How many failed clauses are reported: those that fail on the most nodes.
MAX_CLAUSES: Final = 40
#: How many attributes are replaced by their expressions.
_MAX_EXPANDED: Final = 50
_SINGLE_ATTRIBUTE: Final = re.compile(r"(?:MY\.)?([A-Za-z_]\w*)", re.IGNORECASE)
#: Exceptions of the bindings: built-in ones up to version 23, their own since.
BINDING_ERRORS: Final[tuple[type[Exception], ...]] = (
    OSError,
    ValueError,
    RuntimeError,
    TypeError,
    *filter(None, [getattr(classad2, "ClassAdException", None)]),
)
#: Resource of a partitionable slot that :func:`.idle_jobs.with_full_capacity` does not restore.
_GPUS: Final = "GPUs"
RESOURCES: Final = ("Cpus", "Memory", "Disk", _GPUS)
#: States of a static slot that already has a job.
_TAKEN: Final = frozenset({"Claimed", "Matched", "Preempting"})

Side = Literal["job", "node"]
#: Whether a node can run a job: now; once its jobs have ended; once it is started; once it stops
#: draining; never with its current configuration.
MatchState = Literal["fits", "busy", "off", "draining", "refuses"]


class Clause(NamedTuple):
    """One clause of ``Requirements``. side: the ad that contains it."""

    side: Side
    text: str


@dataclass
class SlotMatch:
    """Whether a slot can run a job. node: its host. failed_clauses: set if it refuses the job."""

    node: str
    state: MatchState
    failed_clauses: list[Clause]


@dataclass
class ClauseStatistics:
    """Nodes on which a clause fails, and their values of the attributes in it."""

    nodes: dict[str, None] = field(default_factory=dict)
    values: dict[str, Counter[str]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)


def analyse(job: Any, slots: Iterable[Any]) -> dict[str, Any]:
    """Compare a pool's slots with a job; plain data. Modifies the slots' ads.

    ``nodes``: number and some names by :data:`MatchState`; ``clauses``: clauses that fail, those that
    fail on the most nodes first; ``largest``: the most of each resource that one node has, and its
    name; ``agents``: nodes by the state of their agent (:data:`AGENT_STATES`); ``hypervisors``: those
    that work on some node.
    """
    best: dict[str, MatchState] = {}
    refusing: dict[str, list[tuple[Any, list[Clause]]]] = {}
    largest: dict[str, tuple[float, str]] = {}
    agents: dict[str, str] = {}
    hypervisors: set[str] = set()
    for slot in slots:
        slot_match = match_slot(job, slot)
        known = best.setdefault(slot_match.node, slot_match.state)
        best[slot_match.node] = min(known, slot_match.state, key=_STATES_BEST_FIRST.index)
        if slot_match.failed_clauses:
            refusing.setdefault(slot_match.node, []).append((slot, slot_match.failed_clauses))
        for name in RESOURCES:
            has = number(slot, name)
            if has is not None and has > largest.get(name, (-1.0, ""))[0]:
                largest[name] = (has, slot_match.node)
        agents[slot_match.node] = said = _agent_state(slot)
        if said == "works":
            hypervisors |= set(filter(None, format_words(slot.get(names.HYPERVISORS))))
    # If one slot of a node can take the job, the node's other slots do not count as refusing.
    left = {node: found for node, found in refusing.items() if best[node] == "refuses"}
    return {
        "nodes": {
            state: _name_list(n for n, b in best.items() if b == state) for state in _STATES_BEST_FIRST
        },
        "clauses": [
            _as_data(clause, statistics) for clause, statistics in _clause_statistics(job, left)
        ],
        "largest": {name: [has, node] for name, (has, node) in largest.items()},
        "agents": {
            kind: _name_list(n for n, a in agents.items() if a == kind) for kind in AGENT_STATES
        },
        "hypervisors": sorted(hypervisors)[:MAX_NODE_NAMES],
    }


_STATES_BEST_FIRST: Final[tuple[MatchState, ...]] = ("fits", "busy", "off", "draining", "refuses")
#: States of a node's agent: it boots VMs; it does not answer; it answers, but no hypervisor booted its
#: probe; it accepts no jobs for a while, because jobs failed there; there is none.
AGENT_STATES: Final = ("works", "silent", "boots-nothing", "rests", "missing")


def _agent_state(slot: Any) -> str:
    """Return the agent's state, from attributes that :mod:`condor.pool.machine_ad` sets.

    Without an agent there is no version attribute.
    """
    if names.HAS_VMJOBS not in slot:
        return "missing"
    if evaluate(names.HAS_VMJOBS, slot) is True:
        return "works"
    if slot.get(names.FAULT):
        return "rests"
    return "boots-nothing" if isinstance(slot.get(names.VERSION), str) else "silent"


def match_slot(job: Any, slot: Any) -> SlotMatch:
    """Return whether a slot can run a job. Restores the full capacity in the slot's ad."""
    node = format_value(slot.get("Machine") or slot.get("Name"))
    divided = slot.get("PartitionableSlot") is True
    free = divided or slot.get("State") not in _TAKEN
    now = free and _match(job, slot)
    with_full_capacity(slot)
    if divided and f"TotalSlot{_GPUS}" in slot:
        slot[_GPUS] = slot[f"TotalSlot{_GPUS}"]
    if slot.get("Draining") is True or slot.get("State") == "Drained":
        return SlotMatch(node, "draining", [])
    if now or _match(job, slot):
        off = slot.get("Offline") is True
        return SlotMatch(node, "off" if off else "fits" if now else "busy", [])
    return SlotMatch(node, "refuses", list(failed_clauses(job, slot)))


def _match(job: Any, slot: Any) -> bool:
    return accepts(job, slot) and accepts(slot, job)


def accepts(own: Any, other: Any) -> bool:
    """Whether another ad meets an ad's ``Requirements``. (The bindings raise if it has none.)"""
    return "Requirements" in own and is_satisfied("Requirements", own, other)


def failed_clauses(job: Any, slot: Any) -> Iterator[Clause]:
    """The failed clauses of both sides; all of ``Requirements`` if no clause fails by itself."""
    sides: tuple[tuple[Side, Any, Any], ...] = (("job", job, slot), ("node", slot, job))
    for side, own, other in sides:
        if accepts(own, other):
            continue
        found = [text for text in requirement_clauses(own) if not is_satisfied(text, own, other)]
        yield from (Clause(side, text) for text in found or [_expression(own, "Requirements")])


def requirement_clauses(ad: Any) -> list[str]:
    """The clauses of an ad's ``Requirements``.

    An attribute of the ad that holds an expression is replaced by the clauses of that expression.
    """
    return list(dict.fromkeys(_expand_clauses(ad, "Requirements", set())))


def _expand_clauses(ad: Any, name: str, known: set[str]) -> Iterator[str]:
    known.add(name.lower())
    for part in conjuncts(_expression(ad, name)):
        other = _SINGLE_ATTRIBUTE.fullmatch(part)
        if not other or not isinstance(ad.get(other[1]), classad2.ExprTree):
            yield part
        elif other[1].lower() not in known and len(known) < _MAX_EXPANDED:
            yield from _expand_clauses(ad, other[1], known)


def _expression(ad: Any, name: str) -> str:
    """An attribute's expression; ``undefined`` if the ad has no such attribute."""
    return str(ad.lookup(name)) if name in ad else "undefined"


def is_satisfied(text: str, own: Any, other: Any) -> bool:
    """Whether ``other`` meets a clause of ``own``; false if the clause cannot be evaluated."""
    value = evaluate(text, own, other)
    return (
        isinstance(value, bool | int | float) and not isinstance(value, classad2.Value) and bool(value)
    )


def evaluate(text: str, own: Any, other: Any = None) -> Any:
    """The value of an expression of ``own`` in a match; ``Value.Error`` if evaluation fails."""
    try:
        return classad2.ExprTree(text).eval(own, other)
    except BINDING_ERRORS:
        return classad2.Value.Error


def number(ad: Any, name: str) -> float | None:
    """An attribute's value, if it is a finite number; otherwise None."""
    value = evaluate(name, ad) if name in ad else None
    if isinstance(value, bool | classad2.Value) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _clause_statistics(
    job: Any, refusing: Mapping[str, list[tuple[Any, list[Clause]]]]
) -> list[tuple[Clause, ClauseStatistics]]:
    found: dict[Clause, ClauseStatistics] = {}
    for node, slots in refusing.items():
        for slot, clauses in slots:
            for clause in clauses:
                statistics = found.setdefault(clause, ClauseStatistics())
                statistics.nodes[node] = None
                _record_values(statistics, clause, job, slot)
    ordered = sorted(found.items(), key=lambda item: -len(item[1].nodes))
    return ordered[:MAX_CLAUSES]


def _record_values(statistics: ClauseStatistics, clause: Clause, job: Any, slot: Any) -> None:
    """Record the job's and the slot's values of the attributes in a clause."""
    own, other = (job, slot) if clause.side == "job" else (slot, job)
    for scope, name in attribute_references(clause.text)[:MAX_ATTRIBUTES]:
        whose = own if scope == "MY" or (not scope and name in own) else other
        text = format_value(evaluate(name, whose, other if whose is own else own))
        if whose is job:
            statistics.own[name] = text
            continue
        statistics.values.setdefault(name, Counter())[text] += 1
        has = number(slot, name)
        if has is not None:
            statistics.largest[name] = max(has, statistics.largest.get(name, has))


def _as_data(clause: Clause, statistics: ClauseStatistics) -> dict[str, Any]:
    return {
        "side": clause.side,
        "text": format_value(format_expression(clause.text), MAX_TEXT_LENGTH),
        "nodes": _name_list(statistics.nodes),
        "job": statistics.own,
        "node": {name: _format_values(name, statistics) for name in statistics.values},
    }


def _format_values(name: str, statistics: ClauseStatistics) -> str:
    counted = statistics.values[name]
    if len(counted) > 1 and name in statistics.largest:
        return f"{statistics.largest[name]:g} at most"
    few = [text for text, _ in counted.most_common(MAX_VALUES)]
    return " or ".join(few) + (" or …" if len(counted) > len(few) else "")


def _name_list(nodes: Iterable[str]) -> dict[str, Any]:
    found = sorted(nodes)
    return {"count": len(found), "names": found[:MAX_NODE_NAMES]}


def format_value(value: Any, limit: int = MAX_VALUE_LENGTH) -> str:
    """Format a value for people, on one line of at most ``limit`` characters."""
    if isinstance(value, bool) or value is None:
        return "undefined" if value is None else str(value).lower()
    if isinstance(value, classad2.Value):
        return "undefined" if value == classad2.Value.Undefined else "error"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def format_words(value: Any) -> list[str]:
    """The formatted words of an HTCondor string list."""
    return [format_value(word) for word in value[:1000].split(",")] if isinstance(value, str) else []
