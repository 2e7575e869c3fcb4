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
from condor.expressions import attributes, conjuncts, usual
from condor.matching import whole

#: Limits of a result: characters of an expression and of a value; nodes, values, and attributes of a
#: clause that are listed.
TEXT, VALUE, NAMED, VALUES, ATTRIBUTES = 400, 80, 5, 4, 12
#: How many failed clauses are reported: those that fail on the most nodes.
CLAUSES: Final = 40
#: How many attributes are replaced by their expressions.
_EXPANDED: Final = 50
_ALONE: Final = re.compile(r"(?:MY\.)?([A-Za-z_]\w*)", re.IGNORECASE)
#: Exceptions of the bindings: built-in ones up to version 23, their own since.
FAILURES: Final[tuple[type[Exception], ...]] = (
    OSError,
    ValueError,
    RuntimeError,
    TypeError,
    *filter(None, [getattr(classad2, "ClassAdException", None)]),
)
#: Resource of a partitionable slot that :func:`condor.idle_jobs.with_full_capacity` does not restore.
_GPUS: Final = "GPUs"
RESOURCES: Final = ("Cpus", "Memory", "Disk", _GPUS)
#: States of a static slot that already has a job.
_TAKEN: Final = frozenset({"Claimed", "Matched", "Preempting"})

Side = Literal["job", "node"]
#: Whether a node can run a job: now; once its jobs have ended; once it is started; once it stops
#: draining; never with its current configuration.
Standing = Literal["fits", "busy", "off", "draining", "refuses"]


class Clause(NamedTuple):
    """One clause of ``Requirements``. side: the ad that contains it."""

    side: Side
    text: str


@dataclass
class Verdict:
    """Whether a slot can run a job. node: its host. failed_clauses: set if it refuses the job."""

    node: str
    standing: Standing
    failing: list[Clause]


@dataclass
class Tally:
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
    best: dict[str, Standing] = {}
    refusing: dict[str, list[tuple[Any, list[Clause]]]] = {}
    largest: dict[str, tuple[float, str]] = {}
    agents: dict[str, str] = {}
    hypervisors: set[str] = set()
    for slot in slots:
        verdict = judge(job, slot)
        known = best.setdefault(verdict.node, verdict.standing)
        best[verdict.node] = min(known, verdict.standing, key=_ORDER.index)
        if verdict.failing:
            refusing.setdefault(verdict.node, []).append((slot, verdict.failing))
        for name in RESOURCES:
            has = number(slot, name)
            if has is not None and has > largest.get(name, (-1.0, ""))[0]:
                largest[name] = (has, verdict.node)
        agents[verdict.node] = said = _said_of_vmjobs(slot)
        if said == "works":
            hypervisors |= set(filter(None, shown_list(slot.get(names.HYPERVISORS))))
    # If one slot of a node can take the job, the node's other slots do not count as refusing.
    left = {node: found for node, found in refusing.items() if best[node] == "refuses"}
    return {
        "nodes": {standing: _named(n for n, b in best.items() if b == standing) for standing in _ORDER},
        "clauses": [_plain(clause, tally) for clause, tally in _tallied(job, left)],
        "largest": {name: [has, node] for name, (has, node) in largest.items()},
        "agents": {kind: _named(n for n, a in agents.items() if a == kind) for kind in AGENTS},
        "hypervisors": sorted(hypervisors)[:NAMED],
    }


_ORDER: Final[tuple[Standing, ...]] = ("fits", "busy", "off", "draining", "refuses")
#: States of a node's agent: it boots VMs; it does not answer; it answers, but no hypervisor booted its
#: probe; it accepts no jobs for a while, because jobs failed there; there is none.
AGENTS: Final = ("works", "silent", "boots-nothing", "rests", "missing")


def _said_of_vmjobs(slot: Any) -> str:
    """Return the agent's state, from attributes that :mod:`condor.machine_ad` sets.

    Without an agent there is no version attribute.
    """
    if names.HAS_VMJOBS not in slot:
        return "missing"
    if evaluated(names.HAS_VMJOBS, slot) is True:
        return "works"
    if slot.get(names.FAULT):
        return "rests"
    return "boots-nothing" if isinstance(slot.get(names.VERSION), str) else "silent"


def judge(job: Any, slot: Any) -> Verdict:
    """Return whether a slot can run a job. Restores the full capacity in the slot's ad."""
    node = shown(slot.get("Machine") or slot.get("Name"))
    divided = slot.get("PartitionableSlot") is True
    free = divided or slot.get("State") not in _TAKEN
    now = free and _match(job, slot)
    whole(slot)
    if divided and f"TotalSlot{_GPUS}" in slot:
        slot[_GPUS] = slot[f"TotalSlot{_GPUS}"]
    if slot.get("Draining") is True or slot.get("State") == "Drained":
        return Verdict(node, "draining", [])
    if now or _match(job, slot):
        off = slot.get("Offline") is True
        return Verdict(node, "off" if off else "fits" if now else "busy", [])
    return Verdict(node, "refuses", list(failing(job, slot)))


def _match(job: Any, slot: Any) -> bool:
    return accepts(job, slot) and accepts(slot, job)


def accepts(own: Any, other: Any) -> bool:
    """Whether another ad meets an ad's ``Requirements``. (The bindings raise if it has none.)"""
    return "Requirements" in own and holds("Requirements", own, other)


def failing(job: Any, slot: Any) -> Iterator[Clause]:
    """The failed clauses of both sides; all of ``Requirements`` if no clause fails by itself."""
    sides: tuple[tuple[Side, Any, Any], ...] = (("job", job, slot), ("node", slot, job))
    for side, own, other in sides:
        if accepts(own, other):
            continue
        found = [text for text in demands(own) if not holds(text, own, other)]
        yield from (Clause(side, text) for text in found or [_expression(own, "Requirements")])


def demands(ad: Any) -> list[str]:
    """The clauses of an ad's ``Requirements``.

    An attribute of the ad that holds an expression is replaced by the clauses of that expression.
    """
    return list(dict.fromkeys(_expanded(ad, "Requirements", set())))


def _expanded(ad: Any, name: str, known: set[str]) -> Iterator[str]:
    known.add(name.lower())
    for part in conjuncts(_expression(ad, name)):
        other = _ALONE.fullmatch(part)
        if not other or not isinstance(ad.get(other[1]), classad2.ExprTree):
            yield part
        elif other[1].lower() not in known and len(known) < _EXPANDED:
            yield from _expanded(ad, other[1], known)


def _expression(ad: Any, name: str) -> str:
    """An attribute's expression; ``undefined`` if the ad has no such attribute."""
    return str(ad.lookup(name)) if name in ad else "undefined"


def holds(text: str, own: Any, other: Any) -> bool:
    """Whether ``other`` meets a clause of ``own``; false if the clause cannot be evaluated."""
    value = evaluated(text, own, other)
    return (
        isinstance(value, bool | int | float) and not isinstance(value, classad2.Value) and bool(value)
    )


def evaluated(text: str, own: Any, other: Any = None) -> Any:
    """The value of an expression of ``own`` in a match; ``Value.Error`` if evaluation fails."""
    try:
        return classad2.ExprTree(text).eval(own, other)
    except FAILURES:
        return classad2.Value.Error


def number(ad: Any, name: str) -> float | None:
    """An attribute's value, if it is a finite number; otherwise None."""
    value = evaluated(name, ad) if name in ad else None
    if isinstance(value, bool | classad2.Value) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


# --------------------------------------------------------------------------- results


def _tallied(
    job: Any, refusing: Mapping[str, list[tuple[Any, list[Clause]]]]
) -> list[tuple[Clause, Tally]]:
    found: dict[Clause, Tally] = {}
    for node, slots in refusing.items():
        for slot, clauses in slots:
            for clause in clauses:
                tally = found.setdefault(clause, Tally())
                tally.nodes[node] = None
                _count(tally, clause, job, slot)
    ordered = sorted(found.items(), key=lambda item: -len(item[1].nodes))
    return ordered[:CLAUSES]


def _count(tally: Tally, clause: Clause, job: Any, slot: Any) -> None:
    """Record the job's and the slot's values of the attributes in a clause."""
    own, other = (job, slot) if clause.side == "job" else (slot, job)
    for scope, name in attributes(clause.text)[:ATTRIBUTES]:
        whose = own if scope == "MY" or (not scope and name in own) else other
        text = shown(evaluated(name, whose, other if whose is own else own))
        if whose is job:
            tally.own[name] = text
            continue
        tally.values.setdefault(name, Counter())[text] += 1
        has = number(slot, name)
        if has is not None:
            tally.largest[name] = max(has, tally.largest.get(name, has))


def _plain(clause: Clause, tally: Tally) -> dict[str, Any]:
    return {
        "side": clause.side,
        "text": shown(usual(clause.text), TEXT),
        "nodes": _named(tally.nodes),
        "job": tally.own,
        "node": {name: _values(name, tally) for name in tally.values},
    }


def _values(name: str, tally: Tally) -> str:
    counted = tally.values[name]
    if len(counted) > 1 and name in tally.largest:
        return f"{tally.largest[name]:g} at most"
    few = [text for text, _ in counted.most_common(VALUES)]
    return " or ".join(few) + (" or …" if len(counted) > len(few) else "")


def _named(nodes: Iterable[str]) -> dict[str, Any]:
    found = sorted(nodes)
    return {"count": len(found), "names": found[:NAMED]}


def shown(value: Any, limit: int = VALUE) -> str:
    """Format a value for people, on one line of at most ``limit`` characters."""
    if isinstance(value, bool) or value is None:
        return "undefined" if value is None else str(value).lower()
    if isinstance(value, classad2.Value):
        return "undefined" if value == classad2.Value.Undefined else "error"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown_list(value: Any) -> list[str]:
    """The formatted words of an HTCondor string list."""
    return [shown(word) for word in value[:1000].split(",")] if isinstance(value, str) else []
