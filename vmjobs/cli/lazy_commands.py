"""Command groups whose commands come from the tables of several packages.

A package declares its commands in its module ``commands``. The module of a command is imported when it
is called, so ``--help`` is quick, and a client needs none of the libraries of a server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Final, NamedTuple

import click

from vmjobs.errors import ConfigError

#: Packages that may bring commands; those that are not installed bring none.
PACKAGES: Final = ("vmjobs", "images", "condor", "node", "api")


class Command(NamedTuple):
    """Where a command is, and its place in the list of its group.

    target: ``module:attribute``. help: one line; a command without help is hidden. before: the command
    of the same group that it precedes in the list; default: it comes last.
    """

    target: str
    help: str
    before: str = ""


#: The commands of a package: name of the group -> name -> command. The program itself is ``vmjobs``.
CommandTable = Mapping[str, Mapping[str, Command]]


class LazyGroup(click.Group):
    """A group of the commands that the tables of all packages list under its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; one with missing libraries fails with a message when called."""
        found = self.table().get(cmd_name)
        if found is None:
            return None
        module, _, attribute = found.target.partition(":")
        try:
            command: click.Command = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            words = cmd_name if self.name == "vmjobs" else f"{self.name} {cmd_name}"
            return _not_installed(words, found.help, str(error.name))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            lines = [(name, command.help) for name, command in self.table().items()]
            formatter.write_dl([line for line in lines if line[1]])

    def table(self) -> dict[str, Command]:
        """Return the commands of this group, in the order of its help text."""
        commands: list[tuple[str, Command]] = []
        for table in _tables():
            for name, command in table.get(str(self.name), {}).items():
                names = [known for known, _ in commands]
                place = names.index(command.before) if command.before in names else len(names)
                commands.insert(place, (name, command))
        return dict(commands)


def _tables() -> Iterator[CommandTable]:
    """Yield the tables of the packages that are installed."""
    for package in PACKAGES:
        name = f"{package}.commands"
        try:
            yield import_module(name).COMMANDS
        except ModuleNotFoundError as error:
            if error.name not in (package, name):  # a module that the table itself lacks
                raise


def _not_installed(words: str, text: str, module: str) -> click.Command:
    """Return a stand-in for a command that lacks a module; it reports that module."""

    @click.command(words, help=text, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def missing(arguments: tuple[str, ...]) -> None:
        raise ConfigError(
            f"`vmjobs {words}` cannot run: the Python module {module} is not installed",
            hint="install vmjobs[agent] on execute nodes, vmjobs[server] for the API and its worker",
        )

    return missing
