"""How the program finds its commands, and what it imports to list them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module

import click
import pytest

from vmjobs.cli.lazy_commands import PACKAGES, LazyGroup
from vmjobs.cli.main import cli

RUN = "import sys; from vmjobs.cli.main import cli, main; "


def commands(group: LazyGroup) -> Iterator[tuple[str, click.Command]]:
    """Yield each command below a group, with its line in the group's list."""
    for name, row in group.table().items():
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield row.help, command
        if isinstance(command, LazyGroup):
            yield from commands(command)


def test_the_tables_lead_to_every_command() -> None:
    found = list(commands(cli))
    assert len(found) > 60
    for line, command in found:
        assert command.help
        assert line.endswith(".") or not line


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_declares_only_commands_of_its_own(package: str) -> None:
    table = import_module(f"{package}.commands").COMMANDS
    targets = [row.target for rows in table.values() for row in rows.values()]
    assert targets
    assert all(target.startswith(f"{package}.") for target in targets)


def test_packages_that_are_not_installed_bring_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmjobs.cli.lazy_commands.PACKAGES", ("vmjobs", "absent", "condor"))
    found = ["job", "cluster", "node", "exec", "exec-unchanged", "enter", "completion"]
    assert list(cli.table()) == found


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = RUN + "cli(['--help'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    prefixes = tuple(f"{package}." for package in PACKAGES)
    imported = {name for name in done.stdout.splitlines()[-1].split() if name.startswith(prefixes)}
    common = {"vmjobs.cli", "vmjobs.cli.lazy_commands", "vmjobs.cli.logs", "vmjobs.cli.main"}
    tables = {f"{package}.commands" for package in PACKAGES}
    assert imported == {"vmjobs.errors", *common, *tables}


@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("serve", "gunicorn"),
        ("image push", "cryptography"),
        pytest.param("agent", "h11", marks=pytest.mark.slow),
        pytest.param("worker", "celery", marks=pytest.mark.slow),
    ],
)
def test_a_command_that_lacks_a_library_says_so(words: str, module: str) -> None:
    code = RUN + f"sys.modules[{module!r}] = None; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 78
    assert done.stderr.startswith(f"vmjobs: `vmjobs {words}` cannot run: the Python module {module}")
    assert "is not installed [BAD_CONFIG]" in done.stderr
