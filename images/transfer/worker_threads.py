"""Worker threads that process tasks a few results ahead of the consumer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

#: Default numbers of threads, and of results that may wait for the consumer.
THREADS: Final = 4
MAX_WAITING_RESULTS: Final = 2
#: After a failure: intervals without a result after which running tasks are abandoned.
PATIENCE: Final = 5


def run_tasks(
    work: Callable[[Task], Result],
    tasks: Iterable[Task],
    check: Callable[[], object],
    interval: float,
    *,
    threads: int = THREADS,
    waiting: int = MAX_WAITING_RESULTS,
) -> Generator[tuple[Task, Result], None, None]:
    """Yield each task and its result, in the order of completion.

    When the consumer closes the generator, running tasks are abandoned: nothing waits for the
    threads. (A ``ThreadPoolExecutor`` keeps the process alive until a silent peer times out.)

    Args:
        check: called after each ``interval`` seconds without a result; may raise.
        waiting: most tasks and results that are waiting, beside those that the threads work on.

    Raises:
        BaseException: the first error of a task, once the tasks that were running then have ended or
            taken too long.
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

    for _ in range(threads):
        threading.Thread(target=run, name="worker", daemon=True).start()
    try:
        yield from _take_results(todo, idle, done, iter(tasks), check, interval, threads + waiting)
    finally:
        ended.set()
        idle.release(threads)


def _take_results(
    todo: SimpleQueue[Task],
    idle: threading.Semaphore,
    done: SimpleQueue[tuple[Task, Result] | BaseException],
    tasks: Iterator[Task],
    check: Callable[[], object],
    interval: float,
    most: int,
) -> Iterator[tuple[Task, Result]]:
    pending = silent_intervals = 0
    failure: BaseException | None = None
    while True:
        while failure is None and pending < most:
            try:
                todo.put(next(tasks))
            except StopIteration:
                break
            idle.release()
            pending += 1
        if not pending or (failure is not None and silent_intervals >= PATIENCE):
            break
        try:
            found = done.get(timeout=interval)
        except Empty:
            silent_intervals += 1
            check()
            continue
        pending -= 1
        silent_intervals = 0
        if not isinstance(found, BaseException):
            yield found
        elif failure is None:
            failure = found
            while idle.acquire(blocking=False):  # no thread has started these
                todo.get()
                pending -= 1
    if failure is not None:
        raise failure
