"""Progress bars, on a terminal's standard error; silence elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from vmjobs.terminal import printable


class _Label(ProgressColumn):
    """What a bar is about: words of others, perhaps, and no markup."""

    def render(self, task: Task) -> Text:
        """The words."""
        return Text(printable(task.description))


def byte_bars(*more: TextColumn) -> Progress:
    """A bar of bytes with rate and time left for each task."""
    terminal = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), *more)
    return Progress(
        _Label(), *columns, console=terminal, transient=True, disable=not terminal.is_terminal
    )


def step_bars() -> Progress:
    """A bar for each thing that is built, and the step that it is at."""
    return Progress(_Label(), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True))
