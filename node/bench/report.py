"""Reports of a measurement: Markdown, and HTML with bars, which a browser prints as PDF."""

from __future__ import annotations

import html
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any, Final

from node.bench.plan import FOLDER, NATIVE, Suite
from node.bench.results import Cell, Results, Row, rows
from vmjobs.model import FrozenModel

_STYLE: Final = """
body { font: 15px/1.45 sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 0.5em 0 2em; table-layout: fixed; width: 100% }
th:first-child, th:last-child { width: 25% }
th, td { border-bottom: 1px solid #ddd; padding: 0.25em 0.6em; text-align: left; vertical-align: top }
.bar { background: #4a7ab5; height: 0.5em; margin-top: 0.2em; max-width: 100% }
.scale { background: #eee }
.small { color: #666; font-size: 85% }
@media print { body { margin: 0; max-width: none } .bar, .scale { print-color-adjust: exact } }
"""


class Published(FrozenModel):
    """What a paper published. test: ``SUITE.TEST``. text: percent of native, or words."""

    test: str
    hypervisor: str
    text: str
    source: str


def published() -> dict[str, list[Published]]:
    """Return the papers' figures, by test."""
    found: dict[str, list[Published]] = {}
    table = tomllib.loads((FOLDER / "published.toml").read_text("utf-8"))
    for fields in table["figure"]:
        entry = Published(**fields)
        found.setdefault(entry.test, []).append(entry)
    return found


def markdown(results: Results) -> str:
    parts = ["# Benchmarks of VMs against their host", *_about_lines(results)]
    for suite, lines in _by_suite(results):
        parts.append(f"\n## {suite.name}: {suite.what}\n")
        parts += _markdown_table(lines)
    parts += _notes(results)
    return "\n".join(parts) + "\n"


def page(results: Results) -> str:
    parts = [
        "<!doctype html>",
        '<html lang="en"><meta charset="utf-8">',
        "<title>Benchmarks of VMs</title>",
    ]
    parts += [f"<style>{_STYLE}</style>", "<h1>Benchmarks of VMs against their host</h1>", "<ul>"]
    parts += [f"<li>{html.escape(line.removeprefix('- '))}" for line in _about_lines(results) if line]
    parts.append("</ul>")
    for suite, lines in _by_suite(results):
        parts.append(f"<h2>{html.escape(f'{suite.name}: {suite.what}')}</h2>")
        parts += _html_table(lines)
    parts += [f"<p>{html.escape(line.removeprefix('- '))}" for line in _notes(results) if line]
    return "\n".join([*parts, "</html>"]) + "\n"


def describe(cell: Cell, unit: str = "") -> str:
    """Return the median with its unit, and the standard deviation if there were several turns."""
    deviation = f" ± {_number(cell.deviation, 2)}" if cell.turns > 1 else ""
    return f"{_number(cell.median, 4)}{unit and ' '}{unit}{deviation}"


def _number(value: float, digits: int) -> str:
    """Return a number with so many significant digits: ``0.01235``, ``45,870``."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if rounded >= 1000 else f"{rounded:g}"


def _by_suite(results: Results) -> Iterable[tuple[Suite, list[list[str | Cell | None]]]]:
    """Yield each suite, and its table: the first line has the titles."""
    papers = published()
    sides = results.plan.sides
    for suite in results.plan.suites:
        lines: list[list[str | Cell | None]] = [["test", *sides, "published (percent of native)"]]
        for row in rows(results):
            if row.case.suite == suite.name:
                said = papers.get(f"{suite.name}.{row.name}", []) if not row.case.neighbour else []
                words = "; ".join(f"{entry.hypervisor} {entry.text} ({entry.source})" for entry in said)
                how = str(row.case).removeprefix(suite.name)
                title = f"{row.test.what}, {row.test.unit}{how}"
                lines.append([title, *(row.cells.get(side) for side in sides), words])
        yield suite, lines


def _markdown_table(lines: Sequence[Sequence[str | Cell | None]]) -> list[str]:
    def text(cell: str | Cell | None) -> str:
        if isinstance(cell, Cell):
            percent = "" if cell.percent is None else f"**{cell.percent:.0f} %** "
            return percent + describe(cell)
        return (cell or "-").replace("|", "\\|")

    written = ["| " + " | ".join(text(cell) for cell in line) + " |" for line in lines]
    return [written[0], "|" + "---|" * len(lines[0]), *written[1:]]


def _html_table(lines: Sequence[Sequence[str | Cell | None]]) -> list[str]:
    def text(cell: str | Cell | None) -> str:
        if not isinstance(cell, Cell):
            return html.escape(cell or "-")
        value = describe(cell)
        if cell.percent is None:
            return value
        bar = f'<div class="bar" style="width: {min(cell.percent, 100):.0f}%"></div>'
        return f'{cell.percent:.0f} %<div class="scale">{bar}</div><span class="small">{value}</span>'

    written = ["<tr>" + "".join(f"<th>{text(cell)}" for cell in lines[0])]
    written += ["<tr>" + "".join(f"<td>{text(cell)}" for cell in line) for line in lines[1:]]
    return ["<table>", *written, "</table>"]


def _about_lines(results: Results) -> list[str]:
    plan, about = results.plan, results.about
    lines = ["", *(f"- {name}: {_flat(value)}" for name, value in about.items())]
    lines.append(f"- image: {plan.image}")
    size = ", as short as possible (--quick)" if plan.quick else ""
    lines.append(f"- turns: {plan.rounds} of each, in alternating order{size}")
    for side in plan.sides:
        mine = [result for result in results.turns if result.turn.side == side and not result.error]
        if mine:
            kernels = ", ".join(sorted({result.kernel for result in mine if result.kernel}))
            paces = [result.pace for result in mine]
            clock = (
                ""
                if side == NATIVE
                else f"; its clock ran at {min(paces):.3f} to {max(paces):.3f} of the host's"
            )
            lines.append(f"- {side}: kernel {kernels}{clock}")
    return lines


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_flat(inner)}" for name, inner in value.items())
    return str(value)


def _notes(results: Results) -> list[str]:
    notes = [
        "",
        "Values are medians and standard deviations of the turns. Percent: speed in VMs, in percent of "
        "the same programs on the host itself with as many processors; beside a neighbour that "
        "misbehaves, in percent of the same side's without it. Times are the host's.",
    ]
    failed = [result for result in results.turns if result.error]
    notes += [
        f"- failed: {result.turn.case} on {result.turn.side}, turn {result.turn.number + 1}: "
        f"{result.error.partition(chr(10))[0]}"
        for result in failed
    ]
    return notes


def compared(first: Results, second: Results) -> list[list[str]]:
    """Return a table of two measurements: test, side, both values, speed of the second in percent.

    A difference within both deviations together is marked ``~``.
    """
    others = {(row.case, row.name): row for row in rows(second)}
    table = []
    for row in rows(first):
        other = others.get((row.case, row.name))
        if other is None or other.test.unit != row.test.unit:
            continue
        for side, cell in row.cells.items():
            if side in other.cells:
                table.append(_compared(row, side, cell, other.cells[side]))
    return table


def _compared(row: Row, side: str, before: Cell, after: Cell) -> list[str]:
    ratio = before.median / after.median if row.test.is_duration else after.median / before.median
    is_noise = abs(before.median - after.median) <= before.deviation + after.deviation
    return [
        f"{row.case}: {row.test.what}",
        side,
        describe(before, row.test.unit),
        describe(after, row.test.unit),
        f"{100 * ratio:.0f} %{' ~' if is_noise else ''}",
    ]
