"""Worker threads: all results, bounded, prompt to stop, failures after finished work."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest

from images.transfer.worker_threads import MAX_WAITING_RESULTS, THREADS, run_tasks
from tests.kit.waiting import wait_until


def test_all_results_come_whatever_their_order() -> None:
    looked: list[int] = []
    found = dict(run_tasks(lambda n: n * n, range(100), lambda: looked.append(1), 5.0))
    assert found == {n: n * n for n in range(100)}
    assert not looked
    assert list(run_tasks(lambda n: n, [], lambda: None, 5.0)) == []


def test_no_more_is_begun_than_may_wait() -> None:
    begun: list[int] = []
    with closing(run_tasks(begun.append, range(100), lambda: None, 5.0)) as results:
        next(results)
        wait_until(lambda: len(begun) >= THREADS + MAX_WAITING_RESULTS, 5)
        assert len(begun) == THREADS + MAX_WAITING_RESULTS


def test_what_was_under_way_is_not_lost_for_a_failure() -> None:
    """A repository that refuses every other request must not prevent all progress."""
    slow = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            raise ValueError("no")
        assert slow.wait(10)
        return number

    results = run_tasks(work, range(100), slow.set, 0.1)
    found = []
    with pytest.raises(ValueError, match="no"):
        for number, _ in results:
            found.append(number)
    assert 1 <= len(found) < THREADS + MAX_WAITING_RESULTS


def test_a_failure_does_not_wait_for_what_hangs() -> None:
    hang = threading.Event()

    def work(number: int) -> None:
        if number == 1:
            raise ValueError("no")
        hang.wait(60)

    began = time.monotonic()
    with pytest.raises(ValueError, match="no"):
        list(run_tasks(work, range(10), lambda: None, 0.05))
    assert time.monotonic() - began < 20
    hang.set()
