"""The results of a measurement: a JSON file that grows with each turn."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import Field, ValidationError

from images.store.files import write_atomically
from node.bench.copies import CopyResult
from node.bench.plan import NATIVE, Case, Plan, Suite, Test, Turn
from vmjobs.errors import Conflict, InvalidRequest, NotFound, reason_of
from vmjobs.model import FrozenModel

_FIGURE: Final = re.compile(
    r"^figure (\S{1,64}) ([0-9]{1,18}(?:\.[0-9]{1,18})?(?:e[+-]?[0-9]{1,2})?)$", re.MULTILINE
)
_KERNEL: Final = re.compile(r"^kernel (\S{1,128})$", re.MULTILINE)


class TurnResult(FrozenModel):
    """What a turn measured.

    figures: by test, the mean of its copies, by the host's clock. pace: of the guests' clocks.
    kernel: that the script ran on. seconds: of the turn, with boots. error: why it failed, or ``""``.
    """

    turn: Turn
    figures: dict[str, float] = Field(default_factory=dict)
    pace: float = 1.0
    kernel: str = ""
    seconds: float = 0.0
    error: str = ""


class Results(FrozenModel):
    """A measurement: where and how, and its turns so far. about: the host and its software."""

    about: dict[str, Any]
    plan: Plan
    turns: tuple[TurnResult, ...] = ()

    def is_done(self, turn: Turn) -> bool:
        """Whether a turn has succeeded."""
        return any(result.turn == turn and not result.error for result in self.turns)

    def with_turn(self, result: TurnResult) -> Results:
        """Return these results with one more turn, in place of an earlier try."""
        kept = tuple(known for known in self.turns if known.turn != result.turn)
        return self.model_copy(update={"turns": (*kept, result)})

    def values(self, case: Case, test: str, side: str) -> list[float]:
        """Return the values of one test on one side, a turn each."""
        return [
            result.figures[test]
            for result in self.turns
            if (result.turn.case, result.turn.side) == (case, side) and not result.error
        ]


def result_of(suite: Suite, turn: Turn, copies: Sequence[CopyResult], seconds: float) -> TurnResult:
    """Return what a turn's copies measured; an error if one of them failed or lacks a figure."""
    errors = [copy.error for copy in copies if copy.error]
    figures: dict[str, list[float]] = {name: [] for name in suite.tests}
    for copy in copies if not errors else ():
        found = {name: float(value) for name, value in _FIGURE.findall(copy.output)}
        if missing := [name for name in suite.tests if name not in found]:
            errors = [f"the script of {suite.name} printed no figure for {', '.join(missing)}"]
            break
        for name, test in suite.tests.items():
            figures[name].append(test.by_the_host_clock(found[name], copy.pace))
    kernel = _KERNEL.search(copies[0].output) if copies else None
    return TurnResult(
        turn=turn,
        figures={} if errors else {name: statistics.fmean(values) for name, values in figures.items()},
        pace=statistics.fmean(copy.pace for copy in copies),
        kernel=kernel[1] if kernel else "",
        seconds=round(seconds, 1),
        error=errors[0] if errors else "",
    )


def load(path: Path) -> Results:
    """Load results.

    Raises:
        NotFound: they cannot be read.
        InvalidRequest: the file has something else.
    """
    try:
        return Results.model_validate_json(path.read_bytes())
    except OSError as error:
        raise NotFound(f"cannot read results from {path}: {reason_of(error)}") from error
    except ValidationError as error:
        raise InvalidRequest(f"{path} has no results of `vmjobs bench run`") from error


def load_or_begin(path: Path, plan: Plan, about: dict[str, Any]) -> Results:
    """Load results of an interrupted measurement, or begin a new one.

    Raises:
        Conflict: the file has results of another plan.
    """
    if not path.exists():
        return Results(about=about, plan=plan)
    known = load(path)
    if known.plan != plan:
        differing = [
            name for name in Plan.model_fields if getattr(known.plan, name) != getattr(plan, name)
        ]
        raise Conflict(
            f"{path.parent} has results of a different measurement: {', '.join(differing)} differ",
            hint="give the same options to continue it, or another directory with --output-dir",
        )
    return known


def save(path: Path, results: Results) -> None:
    """Replace the file atomically."""
    data = results.model_dump_json(indent=1) + "\n"
    write_atomically(path, data.encode(), path.parent)


@dataclass(frozen=True)
class Cell:
    """Values of one test on one side.

    percent: of the native speed; beside a neighbour, of the same side's speed without it; None: it is
    native itself, or there is nothing to compare with.
    """

    median: float
    deviation: float
    turns: int
    percent: float | None


@dataclass(frozen=True)
class Row:
    """A line of the tables: a test of a case. cells: by side, as far as measured."""

    case: Case
    name: str
    test: Test
    cells: dict[str, Cell]


def rows(results: Results) -> list[Row]:
    """Return the lines of the tables, in the order of the plan."""
    return [
        Row(case, name, test, _cells(results, case, name, test))
        for suite in results.plan.suites
        for guests in results.plan.guests
        for neighbour in results.plan.neighbours
        for case in [Case(suite=suite.name, guests=guests, neighbour=neighbour)]
        for name, test in suite.tests.items()
    ]


def _cells(results: Results, case: Case, name: str, test: Test) -> dict[str, Cell]:
    alone = case.model_copy(update={"neighbour": ""})
    cells = {}
    for side in results.plan.sides:
        values = results.values(case, name, side)
        other = results.values(alone, name, side if case.neighbour else NATIVE)
        if not values:
            continue
        median, percent = statistics.median(values), None
        if other and median and (case.neighbour or side != NATIVE):
            base = statistics.median(other)
            percent = 100 * (base / median if test.is_duration else median / base) if base else None
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        cells[side] = Cell(median, deviation, len(values), percent)
    return cells
