"""``vmjobs gateway enable`` and ``disable``: the unit with which systemd starts a gateway."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path
from typing import Final

import click

from node.cli.gateway.common import find_gateway, gateway_options
from vmjobs.cli.common import OWN_COMMAND, echo
from vmjobs.errors import Conflict
from vmjobs.gateway.archive import replace_file
from vmjobs.gateway.directory import GatewayDirectory

_SYSTEM_UNITS: Final = Path("/etc/systemd/system")

#: systemd.service(5). VMs outlive their supervisor, which takes them over again.
_UNIT: Final = """\
[Unit]
Description=Grid gateway {name}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={command}
{environment}Restart=always
RestartSec=10
KillMode=process

[Install]
WantedBy={target}
"""


_user_option = click.option(
    "--user/--system",
    "of_user",
    default=None,
    help="A service of this user, or of the system. [default: of the system for root]",
)


@click.command()
@gateway_options
@_user_option
@click.option("--print", "only_print", is_flag=True, help="Print the unit, and change nothing.")
def enable(name: str | None, state_dir: Path | None, of_user: bool | None, only_print: bool) -> None:
    """Let systemd start the gateway with this host.

    The VMs that are wanted start with it. What runs now goes on. Repeating it renews the unit.
    """
    place = find_gateway(name, state_dir)
    gateway = place.installed().gateway.name
    as_user = os.getuid() != 0 if of_user is None else of_user
    text = _unit(gateway, place, as_user)
    if only_print:
        echo(text.rstrip("\n"))
        return
    unit = _path(gateway, as_user)
    if unit.exists() and not _starts(unit, place):
        raise Conflict(
            f"{unit} starts a gateway of the same name in another directory",
            hint="there: vmjobs gateway disable --state-dir DIRECTORY",
        )
    link = _link(unit, as_user)
    link.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(unit) as file:
        file.write(text.encode())
    link.unlink(missing_ok=True)
    link.symlink_to(unit)
    echo(f"{gateway} starts with this host, by {unit}")
    if as_user:
        user = pwd.getpwuid(os.getuid()).pw_name
        echo(f"so that it does so before {user} logs in: loginctl enable-linger {user}")


@click.command()
@gateway_options
def disable(name: str | None, state_dir: Path | None) -> None:
    """Let systemd no longer start the gateway with this host. What runs now goes on."""
    place = find_gateway(name, state_dir)
    gateway = place.installed().gateway.name
    remove_units(gateway, place)
    echo(f"{gateway} does not start with this host")


def remove_units(gateway: str, place: GatewayDirectory) -> None:
    for as_user in (True, False):
        unit = _path(gateway, as_user)
        if unit.exists() and _starts(unit, place):
            _link(unit, as_user).unlink(missing_ok=True)
            unit.unlink()


def _path(gateway: str, as_user: bool) -> Path:
    own = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"
    return (own if as_user else _SYSTEM_UNITS) / f"vmjobs-gateway-{gateway}.service"


def _link(unit: Path, as_user: bool) -> Path:
    """What `systemctl enable` makes of the unit's `[Install]` (systemd.unit(5))."""
    return unit.parent / f"{_target(as_user)}.wants" / unit.name


def _target(as_user: bool) -> str:
    return "default.target" if as_user else "multi-user.target"


def _starts(unit: Path, place: GatewayDirectory) -> bool:
    _, option, directory = _command(place).rpartition(' "--state-dir" ')
    return f"{option}{directory}\n" in unit.read_text("utf-8", "replace")


def _command(place: GatewayDirectory) -> str:
    words = (*OWN_COMMAND, "gateway", "run", "--state-dir", str(place.directory))
    return " ".join(_quoted(word.replace("$", "$$")) for word in words)


def _unit(gateway: str, place: GatewayDirectory, as_user: bool) -> str:
    settings = sorted(item for item in os.environ.items() if item[0].startswith("VMJOBS_"))
    return _UNIT.format(
        name=gateway,
        command=_command(place),
        environment="".join(f"Environment={_quoted(f'{key}={value}')}\n" for key, value in settings),
        target=_target(as_user),
    )


def _quoted(word: str) -> str:
    """A word of a unit file (systemd.syntax(7); systemd.unit(5), "Specifiers")."""
    escaped = re.sub(r'["\\]', r"\\\g<0>", word).replace("%", "%%")
    return f'"{escaped}"'
