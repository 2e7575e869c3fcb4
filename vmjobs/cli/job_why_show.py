"""Output of `vmjobs job why`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from condor.why import STATUS, Finding, listed
from condor.why_pool import PoolFacts
from condor.why_read import Explanation
from vmjobs.cli.support import echo, print_table


@dataclass(frozen=True)
class View:
    """The content of a job's explanation.

    state: as text. findings: at least one, the answer first. facts: names and values. explanation:
    HTCondor's, if it was asked.
    """

    id: str
    state: str
    findings: Sequence[Finding]
    facts: Sequence[tuple[str, str]] = ()
    explanation: Explanation | None = None


def as_plain(view: View) -> dict[str, Any]:
    """Return the explanation as JSON data. The first finding is the answer."""
    explanation = view.explanation
    pool = explanation.pool if explanation else None
    return {
        "id": view.id,
        "state": view.state,
        "way": list(explanation.way) if explanation else [],
        "findings": [asdict(finding) for finding in view.findings],
        "facts": dict(view.facts),
        "nodes": pool.nodes if pool else {},
        "clauses": list(pool.clauses) if pool else [],
    }


def show(view: View) -> None:
    """Print the answer, further findings and facts, unmet requirements, and remedies."""
    explanation = view.explanation
    answer, *others = view.findings
    way = explanation.way[1:] if explanation else []
    sent = f", and as {', then as '.join(way)}" if way else ""
    echo(f"{view.id} is {view.state}{sent}: {answer.message} [{answer.code}]")
    for finding in others:
        echo(f"  also: {finding.message} [{finding.code}]")
    for name, value in view.facts:
        echo(f"  {name}: {value}")
    if explanation and len(explanation.jobs) and sum(explanation.jobs.values()) > 1:
        echo(f"  its cluster has {_counted(explanation.jobs)}")
    if explanation and explanation.pool and explanation.pool.clauses:
        echo()
        print_table(("CLAUSE", "SIDE", "FAILS ON", "VALUES"), _rows(explanation.pool))
    remedies = list(dict.fromkeys(f.remedy for f in view.findings if f.remedy))
    if remedies:
        echo("\nwhat to do:")
    for remedy in remedies:
        echo(f"  - {remedy}")


def _rows(pool: PoolFacts) -> list[Sequence[str]]:
    return [
        (
            clause["text"],
            clause["side"],
            f"{clause['nodes']['count']} of {pool.total}: {listed(clause['nodes'])}",
            _values(clause),
        )
        for clause in pool.clauses
    ]


def _values(clause: Mapping[str, Any]) -> str:
    sides = {"job": clause["job"], "node": clause["node"]}
    return "; ".join(
        f"{side}: " + ", ".join(f"{name} = {value}" for name, value in values.items())
        for side, values in sides.items()
        if values
    )


def _counted(jobs: Mapping[str, int]) -> str:
    words = {str(number): word for number, word in STATUS.items()}
    return ", ".join(f"{count} {words.get(status, status)}" for status, count in sorted(jobs.items()))
