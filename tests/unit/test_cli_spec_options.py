"""Job specs from the options of ``vmjobs run`` and ``vmjobs job submit``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from vmjobs.cli.spec_options import build_spec, spec_options
from vmjobs.errors import InvalidSpec
from vmjobs.model import JobSpec, Strategy


def spec_of(*words: str) -> JobSpec:
    """The spec of a command line."""
    made: list[JobSpec] = []

    @click.command()
    @spec_options
    def command(
        script: Path | None, arguments: tuple[str, ...], environment: tuple[str, ...], **fields: Any
    ) -> None:
        made.append(build_spec(script, arguments, (), environment, **fields))

    command.main(["--image", "debian-cloud:13", *words], standalone_mode=False)
    return made[0]


@pytest.fixture
def script(path: Path) -> str:
    path.write_text("#!/bin/sh\ntrue\n")
    return str(path)


def test_an_image_needs_no_script_and_a_script_alone_is_as_ever(script: str) -> None:
    for words, strategy, exit, ready_rule in (
        (("--", script, "a", "-b"), Strategy.SCRIPT, "report", "report"),
        (("--exit", "poweroff"), Strategy.IMAGE, "poweroff", "started"),
    ):
        spec = spec_of(*words)
        assert (spec.strategy, spec.exit, spec.ready_rule) == (strategy, exit, ready_rule)
        assert spec.arguments == (("a", "-b") if script in words else ())
        assert spec.script.startswith("#!/bin/sh") is (script in words)
    assert spec_of().strategy is Strategy.IMAGE


@pytest.mark.parametrize("words", [("--exit", "console:^done$"), ("--ready", "console:login:")])
def test_a_rule_of_its_own_makes_it_a_job_of_an_image(script: str, words: tuple[str, str]) -> None:
    spec = spec_of(*words, script)
    assert spec.strategy is Strategy.IMAGE
    assert spec.script
    assert words[1] in {spec.exit, spec.ready}


def test_user_data_comes_from_a_file(path: Path) -> None:
    path.write_text("#cloud-config\n{}\n")
    spec = spec_of("--user-data", str(path), "--exit", "poweroff")
    assert (spec.strategy, spec.user_data) == (Strategy.IMAGE, "#cloud-config\n{}\n")


def test_the_strategy_can_be_said(script: str) -> None:
    assert spec_of("--strategy", "image", script).strategy is Strategy.IMAGE
    with pytest.raises(InvalidSpec) as caught:
        spec_of("--strategy", "script", "--exit", "poweroff", script)
    assert "for the strategy 'image' only" in caught.value.faults[0].message
    with pytest.raises(InvalidSpec) as caught:
        spec_of("--strategy", "script")
    assert "needs a script" in caught.value.faults[0].message


@pytest.mark.parametrize("rule", ["halt", "console:", "console:(", "console:" + "x" * 600, ""])
def test_a_rule_that_is_none(rule: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        spec_of("--exit", rule)
    assert [fault.field for fault in caught.value.faults] == ["exit"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="cannot read"):
        spec_of("--user-data", str(tmp_path / "none"))
    with pytest.raises(InvalidSpec, match="cannot read"):
        spec_of(str(tmp_path / "none"))
    (tmp_path / "empty").touch()
    with pytest.raises(InvalidSpec, match="empty is empty"):
        spec_of(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("written", "mebibytes"),
    [("256", 256), ("2G", 2048), ("1.5g", 1536), ("512MiB", 512), ("1 TB", 1024 * 1024)],
)
def test_sizes_have_units(script: str, written: str, mebibytes: int) -> None:
    spec = spec_of("--memory", written, "--disk", written, script)
    assert (spec.memory, spec.disk) == (mebibytes, mebibytes)


@pytest.mark.parametrize("written", ["2K", "G", "-1", "0.1M", "1e3", "many"])
def test_what_is_no_size_is_refused_with_one_that_is(script: str, written: str) -> None:
    with pytest.raises(click.BadParameter, match="write 512, 512M or 2G"):
        spec_of("--memory", written, script)
