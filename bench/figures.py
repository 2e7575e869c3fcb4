"""Figures: medians, quartiles, a table for people and a JSON file for programs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar


@dataclass(frozen=True)
class Spread:
    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f} .. {self.high:.3f}]"


def spread(values: Sequence[float]) -> Spread:
    """The quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, median, high)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which ``percent`` per cent lie."""
    if len(values) == 1:  # the run has one pair
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    number: of the benchmark in docs/benchmarks.md.
    ours, theirs: in ``unit``, pair by pair; ``theirs`` is empty where there is nothing to compare with.
    measure: what ``value`` is.
    at_most: whether the target is an upper limit.
    details: other observations, for the JSON file. shown: those of them that the table shows, too.
    """

    number: int
    what: str
    ours: Sequence[float]
    theirs: Sequence[float]
    measure: str
    value: float
    quartiles: Spread | None
    target: float
    at_most: bool = True
    details: dict[str, Any] = field(default_factory=dict)
    unit: str = "s"
    shown: Sequence[str] = ()

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target

    def row(self) -> list[str]:
        value = str(self.quartiles) if self.quartiles else f"{self.value:.3f}"
        return [
            str(self.number),
            self.what,
            str(len(self.ours)),
            f"{spread(self.ours)} {self.unit}",
            f"{spread(self.theirs)} {self.unit}" if self.theirs else "-",
            self.measure,
            value,
            f"{'<=' if self.at_most else '>='} {self.target:g}",
            "yes" if self.met else "NO",
        ]


Ours = TypeVar("Ours")
Theirs = TypeVar("Theirs")


def in_turns(
    count: int, ours: Callable[[], Ours], theirs: Callable[[], Theirs]
) -> list[tuple[Ours, Theirs]]:
    """Measure both ``count`` times, in alternating order: effects on each other even out."""
    seen = []
    for number in range(count):
        if number % 2:
            second = theirs()
            seen.append((ours(), second))
        else:
            seen.append((ours(), theirs()))
    return seen


def compare(
    number: int,
    what: str,
    pairs: Sequence[tuple[float, float]],
    target: float,
    *,
    measure: str = "ours / theirs",
    at_most: bool = True,
    details: dict[str, Any] | None = None,
    unit: str = "s",
) -> Finding:
    """A finding whose value is the median of the ratios of pairs (ours, theirs).

    at_most: if false, the values are speeds: the ratio is theirs / ours, and the target a lower limit.
    """
    ratios = spread([ours / theirs if at_most else theirs / ours for ours, theirs in pairs])
    return Finding(
        number,
        what,
        [ours for ours, _ in pairs],
        [theirs for _, theirs in pairs],
        measure,
        ratios.median,
        ratios,
        target,
        at_most,
        details or {},
        unit=unit,
    )


COLUMNS = ("#", "what", "n", "ours", "theirs", "measure", "value", "target", "met")


def table(findings: Sequence[Finding]) -> str:
    """The findings as plain text. Times are medians with quartiles."""
    rows = [list(COLUMNS), *(finding.row() for finding in findings)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [
        f"{finding.number}: {name}: {finding.details[name]}"
        for finding in findings
        for name in finding.shown
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *notes])


def save(path: Path, findings: Sequence[Finding], about: dict[str, Any]) -> None:
    results = [{**asdict(finding), "met": finding.met} for finding in findings]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about, "results": results}, indent=1, default=str) + "\n")
