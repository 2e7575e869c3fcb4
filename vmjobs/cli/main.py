"""The program ``vmjobs`` and its error output."""

from __future__ import annotations

import json
import re
import sys
from itertools import takewhile
from typing import Any, Final

import click

from vmjobs import __version__
from vmjobs.cli.lazy_commands import LazyGroup
from vmjobs.cli.logs import configure_logging
from vmjobs.errors import VMJobsError

_AS_JSON: Final = f"{__name__}.as_json"


class _MainGroup(LazyGroup):
    """All commands. Errors are JSON if the command line has --json."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remember whether --json is given: errors in arguments are then JSON, too."""
        ctx.meta[_AS_JSON] = "--json" in takewhile(lambda word: word != "--", args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (VMJobsError, click.ClickException) as error:
            if not ctx.meta[_AS_JSON]:
                raise
            found = error if isinstance(error, VMJobsError) else _to_usage_error(error)
            _print_lines([json.dumps(_error_as_json(found))])
            ctx.exit(error.exit_code)


@click.command("vmjobs", cls=_MainGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="vmjobs")
@click.option("-v", "--verbose", is_flag=True, help="Log details on standard error.")
@click.pass_context
def cli(ctx: click.Context, verbose: bool) -> None:
    """Run grid jobs in virtual machines."""
    ctx.obj = {"verbose": verbose}
    if verbose:
        configure_logging("DEBUG")


class _UsageError(VMJobsError):
    code = "USAGE"


def _to_usage_error(error: click.ClickException) -> VMJobsError:
    context = getattr(error, "ctx", None)
    hint = f"{context.command_path} --help" if context else ""
    return _UsageError(error.format_message(), hint=hint)


def _error_as_json(error: VMJobsError) -> dict[str, Any]:
    """Return an error as JSON data, with the keys of the API's problem documents."""
    return {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "errors": [fault._asdict() for fault in error.faults],
    }


def main(arguments: list[str] | None = None) -> Any:
    """Entry point. A ``VMJobsError`` becomes a message and the matching exit status."""
    try:
        return cli.main(args=arguments, standalone_mode=True)
    except VMJobsError as error:
        _print_error(error)
        sys.exit(error.exit_code)


def _print_error(error: VMJobsError) -> None:
    lines = [f"vmjobs: {error.message} [{error.code}]"]
    if len(error.faults) > 1 or any(fault.message not in error.message for fault in error.faults):
        lines += [f"  {_format_field(fault.field)}: {fault.message}" for fault in error.faults]
    if error.hint:
        lines.append(f"  hint: {error.hint}")
    _print_lines(lines)


def _format_field(field: str) -> str:
    """Format a field: ``spec.inputs.0.name`` becomes ``inputs, number 1, name``."""
    if not field:
        return "request"
    return re.sub(
        r"\.([0-9]{1,9})(\.|$)",
        lambda found: f", number {int(found[1]) + 1}" + (", " if found[2] else ""),
        field.removeprefix("spec."),
    )


def _print_lines(lines: list[str]) -> None:
    from vmjobs.cli.common import echo  # noqa: PLC0415 - only errors need it

    for line in lines:
        echo(line, err=True)
