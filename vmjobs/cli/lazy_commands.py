"""Command groups that import a command when it is called, so that ``--help`` is quick."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import click

#: name -> (module, attribute, one line of help); a command without help is hidden. The help is in the
#: table so that listing the commands imports none of them.
CommandTable = Mapping[str, tuple[str, str, str]]


class LazyGroup(click.Group):
    """A group of the commands in a table."""

    def __init__(self, *arguments: Any, lazy_commands: CommandTable, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.lazy_commands = lazy_commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands whose modules exist."""
        return [
            name
            for name, (module, _, _) in self.lazy_commands.items()
            if importlib.util.find_spec(module)
        ]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module, attribute, _ = self.lazy_commands[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands of a help text."""
        with formatter.section("Commands"):
            lines = [(name, self.lazy_commands[name][2]) for name in self.list_commands(ctx)]
            formatter.write_dl([line for line in lines if line[1]])
