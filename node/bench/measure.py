"""Takes the turns of a plan, one after the other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from node.bench.copies import Copy, CopyResult
from node.bench.plan import Suite, Turn
from node.bench.results import Results, TurnResult, result_of, save
from vmjobs.errors import VMJobsError

#: Makes the copies of a turn, and their neighbours; what serves them runs meanwhile.
CopyMaker = Callable[[Suite, Turn], AbstractContextManager[tuple[Sequence[Copy], Sequence[Copy]]]]
_READY: Final = "ready"
_ENDED: Final = "ended"


def measure(
    path: Path, results: Results, make: CopyMaker, on_turn: Callable[[Turn], object]
) -> Results:
    """Take the turns that are not done yet; save the results after each.

    path: of the results' file. on_turn: called before each turn, done or not.
    """
    suites = {suite.name: suite for suite in results.plan.suites}
    for turn in results.plan.turns():
        on_turn(turn)
        if not results.is_done(turn):
            results = results.with_turn(_take(suites[turn.case.suite], turn, make))
            save(path, results)
    return results


def _take(suite: Suite, turn: Turn, make: CopyMaker) -> TurnResult:
    began = time.monotonic()
    try:
        with make(suite, turn) as (copies, neighbours):
            found = run_together(copies, neighbours)
    except (VMJobsError, OSError) as error:
        found = [CopyResult("", str(error))]
    return result_of(suite, turn, found, time.monotonic() - began)


def run_together(measured: Sequence[Copy], neighbours: Sequence[Copy] = ()) -> list[CopyResult]:
    """Run copies; they begin together, once all are ready. If one ends before that, all are stopped.

    neighbours: are stopped once the measured ones have ended.
    Returns results of the measured ones in the order in which they ended, after those of neighbours
    that failed. An exception, such as an interrupt, stops all copies, and is raised after their end.
    """
    copies = (*measured, *neighbours)
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    ended: dict[int, CopyResult] = {}

    def run(number: int, copy: Copy) -> None:
        try:
            ended[number] = copy.run(lambda: events.put(_READY))
        except Exception as error:  # a thread's exception would be lost
            ended[number] = CopyResult("", str(error) or type(error).__name__)
        finally:
            events.put(_ENDED)

    threads = [threading.Thread(target=run, args=pair, name="copy") for pair in enumerate(copies)]
    try:
        for thread in threads:
            thread.start()
        began = _start_together(events, copies)
        for thread in threads[: len(measured)]:
            thread.join()
        failed = [
            CopyResult("", f"its neighbour ended early: {result.error}")
            for number, result in list(ended.items())[: None if began else 1]
            if number >= len(measured)
        ]
        for copy in neighbours:
            copy.stop()
        for thread in threads:
            thread.join()
    except BaseException:
        for copy in copies:
            copy.stop()
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join()
        raise
    return [*failed, *(result for number, result in ended.items() if number < len(measured))]


def _start_together(events: queue.SimpleQueue[str], copies: Sequence[Copy]) -> bool:
    """Start all copies once they are ready; if one ends before that, stop all, and return False."""
    for _ in copies:
        if events.get() == _ENDED:
            for copy in copies:
                copy.stop()
            return False
    for copy in copies:
        copy.start()
    return True
