"""Log lines: text for people, JSON for programs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from vmjobs.cli.logs import configure_logging

log = logging.getLogger("vmjobs.test")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers = []  # configure_logging would close them
    yield
    root.handlers = handlers
    root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_says_when_who_what_and_about_what(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO", "json")
    log.debug("not said")
    log.info("job %s: %s took %.3f s", "ab12", "boot", 1.5)
    (line,) = lines(capsys)
    assert datetime.fromisoformat(line.pop("time")).utcoffset() is not None
    assert line == {
        "level": "INFO",
        "logger": "vmjobs.test",
        "message": "job ab12: boot took 1.500 s",
        "job": "ab12",
    }


@pytest.mark.parametrize(
    ("template", "arguments", "about"),
    [
        ("member %s (%d): %s %s", ("vc-0", 2, "running", "PROGRESS"), {"member": "vc-0"}),
        (
            "refused %s a token for VM %d of the member %s of node %s: %s",
            ("n1", 3, "vc-1", "n2", "no"),
            {"member": "vc-1", "node": "n2"},
        ),
        ("100%% of %-5s; the cluster %s gets no machines", ("a", "vc"), {"cluster": "vc"}),
        ("build %s of %s: %s", ("b1", "hep", "no"), {"build": "b1"}),
        ("evicting the image %s", ("sha256:00",), {"image": "sha256:00"}),
        ("the node failed: %s", ("full",), {}),
        ("a subjob %s", ("x",), {}),
        ("%(job)s in a mapping", ({"job": "x"},), {}),
        ("nothing", (), {}),
    ],
)
def test_what_a_line_is_about(
    template: str, arguments: tuple[Any, ...], about: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("INFO", "json")
    log.info(template, *arguments)
    (line,) = lines(capsys)
    assert {k: v for k, v in line.items() if k not in {"time", "level", "logger", "message"}} == about


def test_a_line_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO", "json")
    try:
        raise ValueError("first\nsecond \udcff")
    except ValueError:
        log.exception("job %s", 'a"\n}')
    (line,) = lines(capsys)
    assert line["job"] == 'a"\n}'
    assert "Traceback" in line["exception"]
    assert "second" in line["exception"]


def test_people_get_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO")
    log.warning("job %s", "ab12")
    assert capsys.readouterr().err.endswith("WARNING vmjobs.test: job ab12\n")
