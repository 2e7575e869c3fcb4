"""Strategy `image` with Debian's own, unmodified cloud-init, controlled by NoCloud data."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit.foreign_images import LocalRun, imported, run
from vmjobs.model import ExitChannel, JobState, ReasonCode

pytestmark = pytest.mark.soak

SCRIPT = """#!/bin/sh
echo "$1 from $(. /etc/os-release; echo $ID)"
wc -l < table.txt > lines.txt
exit 3
"""
OWN_DATA = """#cloud-config
write_files:
  - {path: /root/outputs/hello.txt, content: from my own user data}
runcmd:
  - [tar, -C, /root, -cf, /dev/vdd, outputs]
power_state: {mode: poweroff, delay: now}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="module")
def ended(place: Path) -> dict[str, LocalRun]:
    """Run all jobs at once: each mostly waits for its own disk and network."""
    imported("cloud")
    (place / "script.sh").write_text(SCRIPT)
    (place / "table.txt").write_text("a\nb\n")
    (place / "own.yaml").write_text(OWN_DATA)
    table = f"table.txt={place / 'table.txt'}"
    script = ("--input", table, "--output", "*.txt", place / "script.sh", "hello")
    own = (
        "--exit",
        "poweroff",
        "--network",
        "none",
        "--output",
        "*.txt",
        "--user-data",
        place / "own.yaml",
    )
    with ThreadPoolExecutor(3) as pool:
        jobs = {
            name: pool.submit(run, image, place, "--boot-seconds", "400", *options)
            for name, image, options in (
                ("script", "cloud", script),
                ("own", "cloud", own),
                ("uml", "cloud-uml", script),
            )
        }
        return {name: job.result() for name, job in jobs.items()}


@pytest.mark.parametrize("name", ["script", "uml"])
def test_a_script_is_run_as_in_any_image(ended: dict[str, LocalRun], name: str) -> None:
    done = ended[name]
    assert done.report.reason.code is ReasonCode.SCRIPT_FAILED, done.report.reason.message
    assert done.code == 3
    assert done.report.exit is not None
    assert (done.report.exit.code, done.report.exit.channel) == (3, ExitChannel.ENDPOINT)
    assert "hello from debian\n" in done.said
    assert done.outputs == {"table.txt": "a\nb\n", "lines.txt": "2\n"}
    assert "Power down" in done.console


def test_own_user_data_does_what_it_says(ended: dict[str, LocalRun]) -> None:
    done = ended["own"]
    assert done.report.state is JobState.COMPLETED, done.report.reason.message
    assert done.report.exit is not None
    assert done.report.exit.channel is ExitChannel.POWEROFF
    assert done.outputs == {"hello.txt": "from my own user data"}
    assert "NoCloud" in done.console
