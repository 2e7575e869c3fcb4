"""``vmjobs bench run``: a suite of the user's own, in VMs and on the host."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

from node.bench.plan import shipped_suites
from tests.kit.cli import VMJOBS, vmjobs
from tests.kit.image_builds import STORE
from tests.kit.waiting import wait_until

SUITE = """
what = "a loop"
programs = ["sh", "seq"]
memory = 96
disk = 32

[tests.rounds]
what = "rounds of a loop"
unit = "rounds/s"
"""
SCRIPT = """
began=$(date +%s%N)
for _ in $(seq $((BENCH_SCALE * 50000))); do :; done
figure rounds $((BENCH_SCALE * 50000 * 1000000 / (($(date +%s%N) - began) / 1000 + 1)))
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "mine.sh").write_text(SCRIPT)
    path = tmp_path / "mine.toml"
    path.write_text(SUITE)
    return path


def turns(folder: Path) -> list[dict[str, Any]]:
    """The turns in a file of results, if it is there."""
    path = folder / "results.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["turns"] if path.exists() else []
    return found


def test_a_measurement_is_interrupted_and_continues(suite: Path, tmp_path: Path) -> None:
    folder, state = tmp_path / "found", tmp_path / "state"
    words = ["bench", "run", "--suite", str(suite), "--image", "generic", "--hypervisor", "uml"]
    words += ["--guests", "1,2", "--rounds", "2", "--output-dir", str(folder)]
    places = {"image_dir": STORE, "state_dir": state, "hypervisors": "uml"}
    variables = {f"VMJOBS_{name.upper()}": str(value) for name, value in places.items()}
    # A shell that starts the tests in the background lets them ignore SIGINT.
    command = ["env", "--default-signal=INT", VMJOBS, *words]
    first = subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.DEVNULL)
    wait_until(lambda: turns(folder) or None, 240, "a turn")
    first.send_signal(signal.SIGINT)
    assert first.wait(240) != 0
    assert not any((state / "local" / "runs").iterdir()), "a VM's directory is left"
    kept = turns(folder)
    assert 1 <= len(kept) < 8

    done = vmjobs(*words, **places, code=0)
    every = turns(folder)
    assert every[: len(kept)] == kept
    seen = [
        (turn["turn"]["case"]["guests"], turn["turn"]["number"], turn["turn"]["side"]) for turn in every
    ]
    sides = [(0, "native"), (0, "uml"), (1, "uml"), (1, "native")]
    assert seen == [(guests, *rest) for guests in (1, 2) for rest in sides]
    assert all(turn["figures"]["rounds"] > 1000 for turn in every)
    assert {turn["kernel"] for turn in every if turn["turn"]["side"] == "native"} == {
        os.uname().release
    }
    assert {turn["kernel"] for turn in every if turn["turn"]["side"] == "uml"} != {os.uname().release}
    paces = [turn["pace"] for turn in every if turn["turn"]["side"] == "uml"]
    # The host may be busy while it reads a console.
    assert 0.2 < statistics.median(paces) < 5, "clocks of UML are the host's"
    assert done.out == (folder / "report.md").read_text()
    assert "rounds of a loop, rounds/s" in (folder / "report.html").read_text()

    other = vmjobs(*words, "--quick", **places, code=65)
    assert "results of a different measurement: quick differ" in other.err


def test_what_cannot_be_measured(suite: Path, tmp_path: Path) -> None:
    def run(*words: str | Path, code: int) -> str:
        fixed = ("bench", "run", "--suite", suite, "--image", "generic", "--output-dir", tmp_path / "x")
        return vmjobs(
            *fixed, *words, image_dir=STORE, state_dir=tmp_path / "state", hypervisors="uml", code=code
        ).err

    assert "kvm does not work on this host" in run("--hypervisor", "kvm", code=71)
    assert "'1,x' is not a list of numbers like 1,2,4" in run("--guests", "1,x", code=2)
    suite.write_text(SUITE.replace("seq", "hpl"))
    assert "the image lacks programs: mine needs hpl" in run(code=64)
    suite.write_text(SUITE)
    suite.with_suffix(".sh").write_text("echo nothing works >&2\nexit 3\n")
    assert "2 of 2 turns failed" in run("--rounds", "1", code=1)
    assert "status 3" in turns(tmp_path / "x")[0]["error"]
    assert "nothing works" in turns(tmp_path / "x")[1]["error"]


def test_both_sides_reach_a_suites_server(suite: Path, tmp_path: Path) -> None:
    suite.with_suffix(".server.sh").write_text(
        "mkdir files && cd files && echo figure rounds 7 >said && set -- $BENCH_PORTS\n"
        'busybox httpd -p "$BENCH_ADDRESS:$1" && echo ready && exec sleep 600\n'
    )
    suite.write_text(SUITE.replace("rounds/s", "rounds"))  # independent of clocks
    get = 'set -- $BENCH_PORTS\nbusybox wget -q -O - "http://$BENCH_ADDRESS:$1/said"\n'
    suite.with_suffix(".sh").write_text(get)
    folder, state = tmp_path / "found", tmp_path / "state"
    words = ["bench", "run", "--suite", str(suite), "--image", "generic", "--hypervisor", "uml"]
    words += ["--rounds", "1", "--output-dir", str(folder)]
    vmjobs(*words, image_dir=STORE, state_dir=state, hypervisors="uml", code=0)
    assert [turn["figures"] for turn in turns(folder)] == [{"rounds": 7.0}] * 2


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_every_shipped_suite_works(tmp_path: Path) -> None:
    folder, state = tmp_path / "found", tmp_path / "state"
    words = ["bench", "run", "--quick", "--hypervisor", "uml", "--output-dir", str(folder)]
    done = vmjobs(*words, image_dir=STORE, state_dir=state, hypervisors="uml", timeout=1100)
    assert done.code == 0, [turn["error"] for turn in turns(folder) if turn["error"]]
    assert {turn["turn"]["case"]["suite"] for turn in turns(folder)} == set(shipped_suites())
    assert all(value > 0 for turn in turns(folder) for value in turn["figures"].values())
