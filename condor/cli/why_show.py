"""Output of `vmjobs job why`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from condor.diagnose.explainer import JobExplanation
from condor.diagnose.findings import STATUS_TEXT, JobFinding, format_nodes
from condor.diagnose.pool_findings import PoolFacts
from vmjobs.cli.common import echo, print_table


@dataclass(frozen=True)
class JobReport:
    """The content of a job's explanation.

    state: as text. findings: at least one, the answer first. facts: names and values. explanation:
    HTCondor's, if it was asked.
    """

    id: str
    state: str
    findings: Sequence[JobFinding]
    facts: Sequence[tuple[str, str]] = ()
    explanation: JobExplanation | None = None


def report_as_json(report: JobReport) -> dict[str, Any]:
    """Return the explanation as JSON data. The first finding is the answer."""
    explanation = report.explanation
    pool = explanation.pool if explanation else None
    return {
        "id": report.id,
        "state": report.state,
        "way": list(explanation.route) if explanation else [],
        "findings": [asdict(finding) for finding in report.findings],
        "facts": dict(report.facts),
        "nodes": pool.nodes if pool else {},
        "clauses": list(pool.clauses) if pool else [],
    }


def show(report: JobReport) -> None:
    """Print the answer, further findings and facts, unmet requirements, and remedies."""
    explanation = report.explanation
    answer, *others = report.findings
    route = explanation.route[1:] if explanation else []
    sent = f", and as {', then as '.join(route)}" if route else ""
    echo(f"{report.id} is {report.state}{sent}: {answer.message} [{answer.code}]")
    for finding in others:
        echo(f"  also: {finding.message} [{finding.code}]")
    for name, value in report.facts:
        echo(f"  {name}: {value}")
    if explanation and len(explanation.jobs) and sum(explanation.jobs.values()) > 1:
        echo(f"  its cluster has {_count_text(explanation.jobs)}")
    if explanation and explanation.pool and explanation.pool.clauses:
        echo()
        print_table(("CLAUSE", "SIDE", "FAILS ON", "VALUES"), _rows(explanation.pool))
    remedies = list(dict.fromkeys(f.remedy for f in report.findings if f.remedy))
    if remedies:
        echo("\nwhat to do:")
    for remedy in remedies:
        echo(f"  - {remedy}")


def _rows(pool: PoolFacts) -> list[Sequence[str]]:
    return [
        (
            clause["text"],
            clause["side"],
            f"{clause['nodes']['count']} of {pool.total}: {format_nodes(clause['nodes'])}",
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


def _count_text(jobs: Mapping[str, int]) -> str:
    words = {str(number): word for number, word in STATUS_TEXT.items()}
    return ", ".join(f"{count} {words.get(status, status)}" for status, count in sorted(jobs.items()))
