"""Helpers of all commands: settings, client, ids, tables and JSON."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from pydantic import BaseModel
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from vmjobs.config import Config, load
from vmjobs.errors import Unauthenticated, VMJobsError, reason_of
from vmjobs.terminal import printable

if TYPE_CHECKING:
    from vmjobs.client import Client, Images, Retries

_F = TypeVar("_F", bound=Callable[..., Any])

#: An HTCondor job id; ids of the service begin with 0, even shortened ones.
CONDOR_ID: Final = re.compile(r"([1-9][0-9]{0,9})(?:\.([0-9]{1,10}))?")
#: Characters of a shortened id: its 12 digits of time and 4 random ones.
SHORT_ID_LENGTH: Final = 16
#: Exit status after a timeout, as of timeout(1).
EXIT_TIMED_OUT: Final = 124
#: Timeout of shell completion in seconds.
COMPLETION_SECONDS: Final = 1.5
#: Command that runs this program again, wherever it is installed.
OWN_COMMAND: Final = (sys.executable, "-c", "from vmjobs.cli.main import main; main()")


@lru_cache(maxsize=1)
def config(*files: str) -> Config:
    """Return this process's settings. files: settings whose files must be readable."""
    return load(files=files)


def client(retries: Retries | None = None) -> Client:
    """Return a client for the API with the user's token. retries: default: waits are printed.

    Raises:
        Unauthenticated: the token file cannot be read.
    """
    # A slow import that only commands with network access need.
    from vmjobs.client import Client, Retries  # noqa: PLC0415

    settings = config()
    token = read_token(settings.token_file)
    return Client(settings.api_url, token, retries=retries or Retries(on_wait=print_retry))


def repository(retries: Retries | None = None) -> Images:
    """Return a client for the service's images, with the user's token. retries: default: long ones.

    Raises:
        Unauthenticated: the token file cannot be read.
    """
    # A slow import that only commands with network access need.
    from vmjobs.client.images import TRANSFER_RETRIES, Images  # noqa: PLC0415

    settings = config()
    retries = retries or replace(TRANSFER_RETRIES, on_wait=print_retry)
    return Images(settings.api_url, read_token(settings.token_file), retries=retries)


def completion_retries() -> Retries:
    """Return short timeouts, for shell completion."""
    from vmjobs.client import Retries  # noqa: PLC0415 - slow import, network only

    return Retries(deadline=COMPLETION_SECONDS, connect=0.5, read=1.0)


def complete_image(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete names of the service's images; none if it does not answer at once."""
    try:
        with repository(completion_retries()) as images:
            found = images.list()
    except VMJobsError:
        return []
    found = [entry for entry in found if entry.name]
    names = {f"{i.namespace}/{i.name}:{i.tag}" for i in found}
    names |= {f"{i.name}:{i.tag}" for i in found}
    return sorted(name for name in names if name.startswith(incomplete))


image_argument = click.argument("image", metavar="IMAGE", shell_complete=complete_image)


def print_retry(error: VMJobsError, seconds: float) -> None:
    """Print why a command waits."""
    if not is_quiet():
        echo(f"vmjobs: {error.message}; trying again for up to {seconds:.0f} s", err=True)


def read_token(path: Path) -> str:
    """Read the token in ``path``."""
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Unauthenticated(
            f"cannot read a token from {path}: {reason_of(error)}",
            hint="set VMJOBS_TOKEN_FILE to a file with your token",
        ) from error


def json_option(command: _F) -> _F:
    """Add ``--json`` to a command. Errors are then JSON, too: see ``vmjobs.cli.main``."""
    text = "Print JSON; an error as a line of JSON on standard error."
    return click.option("--json", "as_json", is_flag=True, help=text)(command)


def is_quiet() -> bool:
    """Whether the command prints JSON: standard error then has only errors."""
    context = click.get_current_context(silent=True)
    return bool(context and context.params.get("as_json"))


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=_to_json_data))  # noqa: TID251 - ASCII


def _to_json_data(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def echo(text: str = "", *, err: bool = False) -> None:
    """Print lines without control characters: text may come from a guest or a node."""
    click.echo(printable(text, "\n\t"), err=err)  # noqa: TID251 - this is where


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, ids: bool = False) -> None:
    """Print a table; with colours on a terminal, as plain text of full width on a pipe.

    ids: the first column has ids; a terminal shows them shortened, as commands accept them.
    """
    cells = [["" if cell is None else printable(str(cell), "\n") for cell in row] for row in rows]
    console = Console()
    if console.is_terminal and ids:
        short = shorten_ids([row[0] for row in cells])
        cells = [[first, *row[1:]] for first, row in zip(short, cells, strict=True)]
    elif not console.is_terminal:
        console = Console(width=200)
    table = Table(*columns, box=None, pad_edge=False)
    for row in cells:
        # Text: rich would parse a str as markup, and raise if it is invalid.
        table.add_row(*map(Text, row))
    wide = console.options.update(max_width=sys.maxsize)
    if columns[0] and Measurement.get(console, wide, table).maximum > console.width:
        print_items(columns, [[" ".join(cell.split()) for cell in row] for row in cells])
    else:
        console.print(table)


def print_items(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with as many columns as fit, and the other cells below each row.

    A pipe gets all columns.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    terminal = Console()
    width = terminal.width if terminal.is_terminal else sys.maxsize
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    shown = len(columns)
    while shown > 1 and sum(widths[:shown]) + 2 * (shown - 1) > width:
        shown -= 1
    for row in (columns, *rows):
        cells = zip(row[:shown], widths[:shown], strict=True)
        line = "  ".join(cell.ljust(size) for cell, size in cells).rstrip()
        click.secho(line, bold=row is columns)
        rest = "" if row is columns else _join_hidden_cells(columns[shown:], row[shown:])
        for more in textwrap.wrap(rest, max(20, width - 4)):
            echo(f"    {more}")


def _join_hidden_cells(columns: Sequence[str], cells: Sequence[str]) -> str:
    """Join the cells whose columns do not fit; prefix numbers with the column's name."""
    return "; ".join(
        f"{column.lower()} {cell}" if cell[0].isdigit() else cell
        for column, cell in zip(columns, cells, strict=True)
        if cell.strip("-")
    )


def shorten_ids(ids: Sequence[str]) -> list[str]:
    """Shorten ids to prefixes that are unique among them, and most likely overall."""
    length, different = SHORT_ID_LENGTH, len(set(ids))
    while len({each[:length] for each in ids}) < different:
        length += 1
    return [each[:length] for each in ids]


def format_age(moment: datetime) -> str:
    """Return the age of a time as text, such as ``5 min ago``."""
    seconds = int((datetime.now(moment.tzinfo) - moment).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{max(0, seconds)} s ago"
