"""Prints a test run's phases, slowest tests and flaky tests. Usage: report.py RESULTS

RESULTS is a directory with a file ``phases`` (a line for each: seconds, outcome, name) and JUnit XML
of each phase that ran tests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

SLOWEST = 30


class Case(NamedTuple):
    """A test that ran. seconds: with the fixtures that it was the first to use."""

    seconds: float
    phase: str
    name: str
    flaky: str


def main(results: Path) -> None:
    cases = [case for file in sorted(results.glob("*.xml")) for case in cases_of(file)]
    print(f"\nthe slowest {SLOWEST} of {len(cases)} tests")
    for case in sorted(cases, reverse=True)[:SLOWEST]:
        print(f"{case.seconds:8.1f} s  {case.name}")
    for case in cases:
        if case.flaky:
            print(f"flaky: {case.name}: {case.flaky}")
    print(f"\n{'phase':28} {'seconds':>8} {'tests':>6}  outcome")
    for line in (results / "phases").read_text("utf-8").splitlines():
        seconds, outcome, name = line.split(maxsplit=2)
        tests = sum(case.phase == name for case in cases)
        print(f"{name:28} {seconds:>8} {tests or '':>6}  {outcome}")


def cases_of(file: Path) -> list[Case]:
    """The tests of one phase, from the JUnit XML that our own pytest wrote."""
    return [
        Case(
            float(case.get("time", "0")),
            file.stem,
            f"{case.get('classname')}::{case.get('name')}",
            next((p.get("value", "") for p in case.iter("property") if p.get("name") == "flaky"), ""),
        )
        for case in ElementTree.parse(file).iter("testcase")
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
