"""The options that describe a job, the same for ``vmjobs run`` and ``vmjobs job submit``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from vmjobs.errors import Fault, InvalidSpec
from vmjobs.model import HypervisorKind, InputFile, JobSpec, NetworkMode, parse_spec

_F = TypeVar("_F", bound=Callable[..., Any])

_OPTIONS = (
    click.argument("script", type=click.Path(path_type=Path, dir_okay=False)),
    click.argument("arguments", nargs=-1),
    click.option("--image", required=True, help="Image: NAME, NAME:TAG or sha256:DIGEST."),
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
    click.option("--memory", type=int, default=512, show_default=True, help="MiB."),
    click.option(
        "--disk", type=int, default=1024, show_default=True, help="MiB of scratch and outputs."
    ),
    click.option(
        "--hypervisor", type=click.Choice([k.value for k in HypervisorKind]), help="Demand one."
    ),
    click.option(
        "--network",
        type=click.Choice([m.value for m in NetworkMode]),
        default=NetworkMode.REPOSITORY.value,
        show_default=True,
        help="What the guest can reach: nothing, its job, or also the world.",
    ),
    click.option(
        "--boot-seconds", type=int, default=180, show_default=True, help="Deadline to be ready."
    ),
    click.option("--run-seconds", type=int, default=3600, show_default=True, help="Deadline to end."),
)


def spec_options(command: _F) -> _F:
    """Add the options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def split_inputs(inputs: tuple[str, ...]) -> dict[str, Path]:
    """``NAME=FILE`` or ``FILE`` as name in the job's directory and path here."""
    files: dict[str, Path] = {}
    for item in inputs:
        name, equals, path = item.partition("=")
        if not equals:
            name, path = Path(item).name, item
        if name in files:
            why = f"{path} and {files[name]} would both be called {name} in the job's directory"
            raise InvalidSpec(why, faults=[Fault("inputs", "same_name", f"{why}; say NAME=FILE")])
        files[name] = Path(path)
    return files


def split_pairs(items: tuple[str, ...], option: str) -> dict[str, str]:
    """``NAME=VALUE`` arguments as a dictionary.

    Raises:
        InvalidSpec: one of them has no ``=``.
    """
    bad = [item for item in items if "=" not in item]
    if bad:
        why = f"{option} wants NAME=VALUE, not {', '.join(map(repr, bad))}"
        raise InvalidSpec(why, faults=[Fault(option, "not_a_pair", why)])
    return dict(item.split("=", 1) for item in items)


def read_script(path: Path) -> str:
    """The script's text.

    Raises:
        InvalidSpec: it cannot be read, or is not text.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot read {path}: {error}"
        raise InvalidSpec(why, faults=[Fault("script", "unreadable", why)]) from error


def build_spec(
    script: Path,
    arguments: tuple[str, ...],
    described: tuple[InputFile, ...],
    environment: tuple[str, ...],
    **fields: Any,
) -> JobSpec:
    """A spec from options.

    Raises:
        InvalidSpec: with every fault.
    """
    fields.pop("inputs", None)
    pairs = split_pairs(environment, "--env")
    data = {
        **{name: value for name, value in fields.items() if value is not None},
        "script": read_script(script),
        "arguments": arguments,
        "environment": pairs,
        "inputs": described,
    }
    return parse_spec(data)
