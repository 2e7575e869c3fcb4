"""Options that describe a job, shared by ``vmjobs run`` and ``vmjobs job submit``."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from vmjobs.errors import Fault, InvalidSpec, reason_of
from vmjobs.model import HypervisorKind, InputFile, JobSpec, NetworkMode, Strategy, parse_spec

_F = TypeVar("_F", bound=Callable[..., Any])


class _ScriptArgument(click.Path):
    """A path for shell completion, kept as text: it may be an argument of --program."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)


#: MiB per unit of a size; the suffixes B and iB are optional, as in HTCondor's request_memory.
_UNITS: Final = {"M": 1, "G": 1024, "T": 1024 * 1024}
_SIZE: Final = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*(?:([MGT])(?:I?B)?)?", re.ASCII)


def parse_mebibytes(_context: click.Context, _option: click.Parameter, value: str) -> int:
    """Parse a size in MiB, or one with a unit: ``512``, ``2G``, ``1.5GiB``."""
    found = _SIZE.fullmatch(value.upper())
    size = Decimal(found[1]) * _UNITS[found[2] or "M"] if found else None
    if size is None or size != int(size):
        raise click.BadParameter(f"{value!r} is not a whole number of MiB; write 512, 512M or 2G")
    return int(size)


_OPTIONS = (
    click.argument("script", type=_ScriptArgument(), required=False),
    click.argument("arguments", nargs=-1),
    click.option(
        "--image",
        required=True,
        help="Image: [NAMESPACE/]NAME[:TAG] or sha256:DIGEST; or a container image, imported first: "
        "oci:REGISTRY/NAME:TAG.",
    ),
    click.option(
        "--program",
        is_flag=True,
        help="Run the image's own program, a container's entry point: all words are its arguments.",
    ),
    click.option(
        "--exit",
        "exit",
        metavar="RULE",
        help="How the job's end is recognized: `report` by the guest (default), `poweroff` of the "
        "VM, or `console:REGEX`, a line of its console.",
    ),
    click.option(
        "--ready",
        metavar="RULE",
        help="How a booted guest is recognized: `report` by the guest, `started` (no waiting; "
        "default if --exit is not `report`), or `console:REGEX`.",
    ),
    click.option(
        "--user-data",
        type=click.Path(path_type=Path, dir_okay=False),
        help="cloud-init user data for the image, in place of the user data that runs SCRIPT.",
    ),
    click.option(
        "--strategy",
        type=click.Choice([s.value for s in Strategy]),
        help="Default: `image` without SCRIPT or with --exit, --ready or --user-data, else `script`.",
    ),
    click.option(
        "--input",
        "inputs",
        multiple=True,
        metavar="[NAME=]FILE",
        help="A file for the job's directory; NAME is its name there. May be repeated.",
    ),
    click.option(
        "--output",
        "outputs",
        multiple=True,
        metavar="GLOB",
        help="Files to bring back. May be repeated.",
    ),
    click.option("--env", "environment", multiple=True, metavar="NAME=VALUE", help="May be repeated."),
    click.option("--name", default="", help="A name for the job."),
    click.option("--cpus", type=int, default=1, show_default=True),
    click.option(
        "--memory",
        callback=parse_mebibytes,
        metavar="MIB",
        default="512",
        show_default=True,
        help="MiB, or with a unit: 2G.",
    ),
    click.option(
        "--disk",
        callback=parse_mebibytes,
        metavar="MIB",
        default="1024",
        show_default=True,
        help="Scratch and outputs: MiB, or with a unit.",
    ),
    click.option(
        "--hypervisor", type=click.Choice([k.value for k in HypervisorKind]), help="Require this one."
    ),
    click.option(
        "--network",
        type=click.Choice([m.value for m in NetworkMode]),
        default=NetworkMode.REPOSITORY.value,
        show_default=True,
        help="What the guest can reach: nothing, its guest endpoint, or also outside hosts.",
    ),
    click.option(
        "--boot-seconds", type=int, default=180, show_default=True, help="Deadline to be ready."
    ),
    click.option("--run-seconds", type=int, default=3600, show_default=True, help="Deadline to end."),
)


def spec_options(command: _F) -> _F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def split_inputs(inputs: tuple[str, ...]) -> dict[str, Path]:
    """Parse ``NAME=FILE`` or ``FILE`` into name in the job's directory and local path."""
    files: dict[str, Path] = {}
    for item in inputs:
        name, equals, path = item.partition("=")
        if not equals:
            name, path = Path(item).name, item
        if name in files:
            why = f"{path} and {files[name]} would both be called {name} in the job's directory"
            raise InvalidSpec(why, faults=[Fault("inputs", "same_name", f"{why}; use NAME=FILE")])
        files[name] = Path(path)
    return files


def split_pairs(items: tuple[str, ...], option: str) -> dict[str, str]:
    """Return ``NAME=VALUE`` arguments as a dictionary.

    Raises:
        InvalidSpec: an argument has no ``=``.
    """
    bad = [item for item in items if "=" not in item]
    if bad:
        why = f"{option} requires NAME=VALUE, not {', '.join(map(repr, bad))}"
        raise InvalidSpec(why, faults=[Fault(option, "not_a_pair", why)])
    return dict(item.split("=", 1) for item in items)


def _read_text(path: Path, field: str) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot read {path}: {reason_of(error)}"
        raise InvalidSpec(why, faults=[Fault(field, "unreadable", why)]) from error


def build_spec(
    script: str | None,
    arguments: tuple[str, ...],
    described: tuple[InputFile, ...],
    environment: tuple[str, ...],
    **fields: Any,
) -> JobSpec:
    """Build a job spec from options.

    Raises:
        InvalidSpec: with all faults.
    """
    fields.pop("inputs", None)
    if fields.pop("program", False) and script is not None:
        arguments, script = (script, *arguments), None
    pairs = split_pairs(environment, "--env")
    own_rules = any(fields.get(name) is not None for name in ("exit", "ready", "user_data"))
    default = Strategy.SCRIPT if script is not None and not own_rules else Strategy.IMAGE
    fields["strategy"] = fields.get("strategy") or default
    if user_data := fields.get("user_data"):
        fields["user_data"] = _read_text(user_data, "user_data")
    text = ""
    if script is not None and not (text := _read_text(Path(script), "script")):
        why = f"{Path(script)} is empty"
        raise InvalidSpec(why, faults=[Fault("script", "empty", why)])
    data = {
        **{name: value for name, value in fields.items() if value is not None},
        "script": text,
        "arguments": arguments,
        "environment": pairs,
        "inputs": described,
    }
    return parse_spec(data)
