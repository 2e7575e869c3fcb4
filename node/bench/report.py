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
table { border-collapse: collapse; margin: 0.5em 0 2em; width: 100% }
th, td { border-bottom: 1px solid #ddd; padding: 0.25em 0.6em; text-align: left; vertical-align: top }
.bar { background: #4a7ab5; height: 0.5em; margin-top: 0.2em; max-width: 100% }
.scale { background: #eee; width: 10em }
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
    """Return the report as Markdown."""
    parts = ["# Benchmarks of VMs against their host", *_about_lines(results)]
    for suite, lines in _by_suite(results):
        parts.append(f"\n## {suite.name}: {suite.what}\n")
        parts += _markdown_table(lines)
    parts += _notes(results)
    return "\n".join(parts) + "\n"


def page(results: Results) -> str:
    """Return the report as an HTML page."""
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


def describe(cell: Cell, unit: str) -> str:
    """Return median and standard deviation with their unit."""
    return f"{cell.median:.4g} {unit} ± {cell.deviation:.2g}"


def _by_suite(results: Results) -> Iterable[tuple[Suite, list[list[str | Cell | None]]]]:
    """Yield each suite, and its table: the first line has the titles."""
    papers = published()
    sides, several = results.plan.sides, results.plan.guests != (1,)
    for suite in results.plan.suites:
        lines: list[list[str | Cell | None]] = [
            ["test", *(["copies"] if several else []), *sides, "published (percent of native)"]
        ]
        for row in rows(results):
            if row.suite == suite.name:
                said = papers.get(f"{row.suite}.{row.name}", [])
                words = "; ".join(f"{entry.hypervisor} {entry.text} ({entry.source})" for entry in said)
                title = f"{row.test.what}, {row.test.unit}"
                copies: list[str | Cell | None] = [str(row.guests)] if several else []
                lines.append([title, *copies, *(row.cells.get(side) for side in sides), words])
        yield suite, lines


def _markdown_table(lines: Sequence[Sequence[str | Cell | None]]) -> list[str]:
    def text(cell: str | Cell | None) -> str:
        if isinstance(cell, Cell):
            percent = "" if cell.percent is None else f"**{cell.percent:.0f} %** "
            return f"{percent}{cell.median:.4g} ± {cell.deviation:.2g}"
        return (cell or "-").replace("|", "\\|")

    written = ["| " + " | ".join(text(cell) for cell in line) + " |" for line in lines]
    return [written[0], "|" + "---|" * len(lines[0]), *written[1:]]


def _html_table(lines: Sequence[Sequence[str | Cell | None]]) -> list[str]:
    def text(cell: str | Cell | None) -> str:
        if not isinstance(cell, Cell):
            return html.escape(cell or "-")
        value = f"{cell.median:.4g} ± {cell.deviation:.2g}"
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
        "the same programs on the host itself with as many processors. Times are the host's.",
    ]
    failed = [result for result in results.turns if result.error]
    notes += [
        f"- failed: {result.turn.suite} on {result.turn.side}, {result.turn.guests} at once, "
        f"turn {result.turn.number + 1}: {result.error}"
        for result in failed
    ]
    return notes


def compared(first: Results, second: Results) -> list[list[str]]:
    """Return a table of two measurements: test, side, both values, speed of the second in percent.

    A difference within both deviations together is marked ``~``.
    """
    others = {(row.suite, row.name, row.guests): row for row in rows(second)}
    table = []
    for row in rows(first):
        other = others.get((row.suite, row.name, row.guests))
        if other is None or other.test.unit != row.test.unit:
            continue
        for side, cell in row.cells.items():
            if side in other.cells:
                table.append(_compared(row, side, cell, other.cells[side]))
    return table


def _compared(row: Row, side: str, before: Cell, after: Cell) -> list[str]:
    ratio = before.median / after.median if row.test.is_duration else after.median / before.median
    is_noise = abs(before.median - after.median) <= before.deviation + after.deviation
    copies = f", {row.guests} at once" if row.guests != 1 else ""
    return [
        f"{row.suite}: {row.test.what}{copies}",
        side,
        describe(before, row.test.unit),
        describe(after, row.test.unit),
        f"{100 * ratio:.0f} %{' ~' if is_noise else ''}",
    ]
