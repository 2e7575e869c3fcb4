"""The plan, results and reports of ``vmjobs bench``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from node.bench import report
from node.bench.copies import CopyResult
from node.bench.measure import run_together
from node.bench.plan import Plan, Suite, load_suite, shipped_suites
from node.bench.results import Results, load_or_begin, result_of, save
from vmjobs.errors import Conflict, InvalidRequest, NotFound

DIGEST = "sha256:" + "0" * 64
SUITE = Suite(
    name="mine",
    what="mine",
    tests={
        "speed": {"what": "a speed", "unit": "events/s"},
        "time": {"what": "a time", "unit": "ms"},
        "size": {"what": "a size", "unit": "MiB"},
    },
    script="",
)


def plan_of(**fields: object) -> Plan:
    return Plan(image=DIGEST, suites=(SUITE,), sides=("native", "uml"), **{"rounds": 2, **fields})


def results_of(
    native: list[float], uml: list[float], error: str = "", slower: float | None = None
) -> Results:
    """Results of turns with these speeds, and times that are their inverse. slower: by a neighbour."""
    plan = plan_of(rounds=len(native), neighbours=("", "fork") if slower else ("",))
    results = Results(about={"host": "a <host>"}, plan=plan)
    for turn in plan.turns():
        value = (native if turn.side == "native" else uml)[turn.number]
        value /= slower if turn.case.neighbour and slower else 1
        printed = f"kernel 6.1\nready\nfigure speed {value}\nfigure time {1 / value}\nfigure size 7\n"
        results = results.with_turn(result_of(SUITE, turn, [CopyResult(printed, error)], 1.0))
    return results


def test_sides_take_turns_and_go_first_equally_often() -> None:
    order = [(turn.case.guests, turn.number, turn.side) for turn in plan_of(guests=(1, 2)).turns()]
    once = [(0, "native"), (0, "uml"), (1, "uml"), (1, "native")]
    assert order == [(guests, *rest) for guests in (1, 2) for rest in once]


def test_the_shipped_suites_are_complete() -> None:
    names = shipped_suites()
    assert len(names) >= 8
    tests = {f"{name}.{test}" for name in names for test in load_suite(name).tests}
    assert report.published().keys() <= tests
    for name in names:
        suite = load_suite(name)
        assert all(test in suite.script for test in suite.tests), name


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (None, NotFound, "cannot read the suite"),
        ("what = ", InvalidRequest, "is no TOML"),
        ("what = 'x'\ncpu = 2\ntests = {}", InvalidRequest, "cpu: is an unknown field"),
    ],
)
def test_a_suite_of_ones_own_with_mistakes(
    tmp_path: Path, text: str | None, error: type[Exception], message: str
) -> None:
    path = tmp_path / "mine.toml"
    (tmp_path / "mine.sh").touch()
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=message):
        load_suite(str(path))


def test_a_suite_that_does_not_exist() -> None:
    with pytest.raises(NotFound, match="there is no suite 'cpus'; there are compile, cpu"):
        load_suite("cpus")


def test_figures_are_those_of_the_hosts_clock() -> None:
    """A guest whose clock runs at half speed sees half the time, and twice the speed."""
    turn = next(plan_of().turns())
    printed = "figure speed 200\nfigure time 5\nfigure size 7\n"
    copies = [
        CopyResult(printed, pace=0.5),
        CopyResult("figure speed 50\nfigure time 2e1\nfigure size 9\n"),
    ]
    assert result_of(SUITE, turn, copies, 1.0).figures == {"speed": 75.0, "time": 15.0, "size": 8.0}


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (CopyResult("figure speed 1\nfigure time 1e-3\nfigure size -\n"), "no figure for size"),
        (CopyResult("", "the script ended with status 3"), "status 3"),
    ],
)
def test_a_turn_without_all_figures_has_failed(copy: CopyResult, message: str) -> None:
    result = result_of(SUITE, next(plan_of().turns()), [copy], 1.0)
    assert message in result.error
    assert result.figures == {}


def test_a_measurement_continues_where_it_was(tmp_path: Path) -> None:
    path, plan = tmp_path / "results.json", plan_of(rounds=1)
    native, uml = plan.turns()
    good = CopyResult("figure speed 1\nfigure time 1\nfigure size 1\n")
    results = load_or_begin(path, plan, {"host": "this"})
    results = results.with_turn(result_of(SUITE, native, [good], 1.0))
    results = results.with_turn(result_of(SUITE, uml, [CopyResult("", "it broke")], 1.0))
    save(path, results)
    again = load_or_begin(path, plan, {"host": "another"})
    assert (again.is_done(native), again.is_done(uml), again.about) == (True, False, {"host": "this"})
    assert len(again.with_turn(result_of(SUITE, uml, [good], 1.0)).turns) == 2
    with pytest.raises(Conflict, match="rounds, quick differ"):
        load_or_begin(path, plan_of(rounds=3, quick=True), {})


def test_the_reports() -> None:
    results = results_of([100, 110, 90], [50, 55, 45])
    large = report.markdown(results_of([123456, 123456], [12345.6, 12645.6]))
    assert "| a speed, events/s | 123,500 ± 0 | **10 %** 12,500 ± 210 | - |" in large
    text, page = report.markdown(results), report.page(results)
    assert "| a speed, events/s | 100 ± 10 | **50 %** 50 ± 5 | - |" in text
    assert "| a time, ms | 0.01 ± 0.001 | **50 %** 0.02 ± 0.002 | - |" in text
    assert "a &lt;host&gt;" in page
    assert "width: 50%" in page
    failed = report.markdown(results_of([1], [1], error="it broke"))
    assert "| a speed, events/s | - | - | - |" in failed
    assert "failed: mine on uml, turn 1: it broke" in failed


def test_a_comparison_marks_what_is_noise() -> None:
    before, after = results_of([100, 110, 90], [50, 51, 49]), results_of([102, 112, 92], [100, 101, 99])
    speeds = [line[1:] for line in report.compared(before, after) if "a speed" in line[0]]
    assert speeds == [
        ["native", "100 events/s ± 10", "102 events/s ± 10", "102 % ~"],
        ["uml", "50 events/s ± 1", "100 events/s ± 1", "200 %"],
    ]


def test_beside_a_neighbour_percent_are_of_the_same_side_without_it() -> None:
    text = report.markdown(results_of([100], [50], slower=4))
    assert "| a speed, events/s | 100 | **50 %** 50 | - |" in text
    assert "| a speed, events/s, beside fork | **25 %** 25 | **25 %** 12.5 | - |" in text


class Script:
    """A copy that ends when it is told to, or by itself."""

    def __init__(self, ends: bool) -> None:
        self._ended = threading.Event()
        self._ends = ends

    def run(self, on_ready: Callable[[], object]) -> CopyResult:
        on_ready()
        assert self._ended.wait(10)
        return CopyResult("" if self._ends else "stopped", "" if self._ends else "out of memory")

    def start(self) -> None:
        if self._ends:
            self._ended.set()

    def stop(self) -> None:
        self._ended.set()


class Broken(Script):
    def run(self, on_ready: Callable[[], object]) -> CopyResult:
        return CopyResult("", "out of memory")


def test_a_neighbour_lasts_until_the_measured_copies_have_ended() -> None:
    assert run_together([Script(ends=True)], [Script(ends=False)]) == [CopyResult("")]


def test_a_turn_beside_a_neighbour_that_ended_has_failed() -> None:
    first = run_together([Script(ends=True)], [Broken(ends=False)])[0]
    assert first.error == "its neighbour ended early: out of memory"
