"""Progress of long steps on standard error: bars on a terminal, else lines."""

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

from vmjobs.cli.common import echo, is_quiet
from vmjobs.terminal import printable

#: Seconds until the first line of a step, and between later lines.
FIRST_LINE_SECONDS: Final = 2.0
NEXT_LINE_SECONDS: Final = 10.0


class _LabelColumn(ProgressColumn):
    """A bar's description. It may be untrusted text, so rich's markup is off."""

    def render(self, task: Task) -> Text:
        return Text(printable(task.description))


class _LineProgress(Progress):
    """Progress as lines for log files: one every few seconds and at each further step.

    amount: returns a task's progress as text.
    """

    def __init__(self, amount: Callable[[Task], str]) -> None:
        super().__init__(disable=True)
        self._amount = amount
        self._printed: dict[TaskID, tuple[str, bool]] = {}
        self._is_long, self._is_over = threading.Event(), threading.Event()
        self._timer = threading.Thread(target=self._print_periodically, daemon=True)

    def start(self) -> None:
        if not is_quiet():
            self._timer.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._timer.is_alive():
            self._timer.join()

    def update(self, task_id: TaskID, **fields: Any) -> None:
        super().update(task_id, **fields)
        task = self._tasks[task_id]
        if self._is_long.is_set() and self._printed.get(task_id) != (task.description, task.finished):
            self._print_line(task)

    def _print_periodically(self) -> None:
        pause = FIRST_LINE_SECONDS
        while not self._is_over.wait(pause):
            self._is_long.set()
            for task in self.tasks:
                if not task.finished:
                    self._print_line(task)
            pause = NEXT_LINE_SECONDS

    def _print_line(self, task: Task) -> None:
        self._printed[task.id] = (task.description, task.finished)
        echo(f"{task.description}: {self._amount(task)}, {task.elapsed or 0:.0f} s", err=True)


def byte_bars(*more: TextColumn) -> Progress:
    """Return a progress display of bytes, with rate and time left for each task."""
    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        return _LineProgress(_megabytes)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), *more)
    return Progress(_LabelColumn(), *columns, console=terminal, transient=True)


def step_bars(*, transient: bool = False) -> Progress:
    """Return a progress display with the current step of each task."""
    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        return _LineProgress(lambda task: f"{task.percentage:.0f}%")
    columns = (_LabelColumn(), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=terminal, transient=transient)


def _megabytes(task: Task) -> str:
    whole = "" if task.total is None else f" of {task.total / 1e6:.0f}"
    return f"{task.completed / 1e6:.0f}{whole} MB"
