"""Threads at work on a list of tasks, a few tasks ahead of whoever takes the results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

#: Threads, and results that may wait to be taken; together they bound the memory.
THREADS: Final = 4
AHEAD: Final = 2
#: After a failure: so many looks without a result, and what is under way is given up as well.
PATIENCE: Final = 5


def worked(
    work: Callable[[Task], Result], tasks: Iterable[Task], look: Callable[[], object], every: float
) -> Generator[tuple[Task, Result], None, None]:
    """Each task and its result, in the order in which they get done.

    Nobody waits for the threads: when the results are no longer wanted, what is under way is let
    go. (A ``ThreadPoolExecutor`` keeps the process from ending until a silent peer is given up.)

    Args:
        look: called whenever ``every`` seconds passed without a result; may raise.

    Raises:
        Whatever a task raised first, once those that were under way by then have ended or taken
            too long.
    """
    todo: SimpleQueue[Task] = SimpleQueue()
    done: SimpleQueue[tuple[Task, Result] | BaseException] = SimpleQueue()
    ended = threading.Event()
    idle = threading.Semaphore(0)

    def run() -> None:
        while True:
            idle.acquire()
            if ended.is_set():
                return
            task = todo.get()
            try:
                done.put((task, work(task)))
            except BaseException as error:
                done.put(error)

    for _ in range(THREADS):
        threading.Thread(target=run, name="worker", daemon=True).start()
    try:
        yield from _taken(todo, idle, done, iter(tasks), look, every)
    finally:
        ended.set()
        idle.release(THREADS)


def _taken(
    todo: SimpleQueue[Task],
    idle: threading.Semaphore,
    done: SimpleQueue[tuple[Task, Result] | BaseException],
    tasks: Iterator[Task],
    look: Callable[[], object],
    every: float,
) -> Iterator[tuple[Task, Result]]:
    pending = silent = 0
    failure: BaseException | None = None
    while True:
        while failure is None and pending < THREADS + AHEAD:
            try:
                todo.put(next(tasks))
            except StopIteration:
                break
            idle.release()
            pending += 1
        if not pending or (failure is not None and silent >= PATIENCE):
            break
        try:
            found = done.get(timeout=every)
        except Empty:
            silent += 1
            look()
            continue
        pending -= 1
        silent = 0
        if not isinstance(found, BaseException):
            yield found
        elif failure is None:
            failure = found
            while idle.acquire(blocking=False):  # nobody has begun with these
                todo.get()
                pending -= 1
    if failure is not None:
        raise failure
