"""How far long steps are: bars on a terminal's standard error, and lines where there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from vmjobs.cli.support import echo, is_quiet
from vmjobs.terminal import printable

#: Seconds until a step counts as long, and from then on from one line to the next.
FIRST_LINE: Final = 2.0
NEXT_LINE: Final = 10.0


class _Label(ProgressColumn):
    """What a bar is about: words of others, perhaps, and no markup."""

    def render(self, task: Task) -> Text:
        """The words."""
        return Text(printable(task.description))


class _Lines(Progress):
    """The same in lines, for log files: one every few seconds, and one for each step that follows.

    amount: how much of a task is done, in words.
    """

    def __init__(self, amount: Callable[[Task], str]) -> None:
        super().__init__(disable=True)
        self._amount = amount
        self._said: dict[TaskID, tuple[str, bool]] = {}
        self._is_long, self._is_over = threading.Event(), threading.Event()
        self._clock = threading.Thread(target=self._tell_on, daemon=True)

    def start(self) -> None:
        """Begin to count the time."""
        if not is_quiet():
            self._clock.start()

    def stop(self) -> None:
        """Say nothing more."""
        self._is_over.set()
        if self._clock.is_alive():
            self._clock.join()

    def update(self, task_id: TaskID, **fields: Any) -> None:
        """See Progress.update."""
        super().update(task_id, **fields)
        task = self._tasks[task_id]
        if self._is_long.is_set() and self._said.get(task_id) != (task.description, task.finished):
            self._tell(task)

    def _tell_on(self) -> None:
        pause = FIRST_LINE
        while not self._is_over.wait(pause):
            self._is_long.set()
            for task in self.tasks:
                if not task.finished:
                    self._tell(task)
            pause = NEXT_LINE

    def _tell(self, task: Task) -> None:
        self._said[task.id] = (task.description, task.finished)
        echo(f"{task.description}: {self._amount(task)}, {task.elapsed or 0:.0f} s", err=True)


def byte_bars(*more: TextColumn) -> Progress:
    """A bar of bytes with rate and time left for each task."""
    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        return _Lines(_megabytes)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), *more)
    return Progress(_Label(), *columns, console=terminal, transient=True)


def step_bars(*, transient: bool = False) -> Progress:
    """A bar for each thing that is made, and the step that it is at."""
    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        return _Lines(lambda task: f"{task.percentage:.0f}%")
    columns = (_Label(), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=terminal, transient=transient)


def _megabytes(task: Task) -> str:
    whole = "" if task.total is None else f" of {task.total / 1e6:.0f}"
    return f"{task.completed / 1e6:.0f}{whole} MB"
