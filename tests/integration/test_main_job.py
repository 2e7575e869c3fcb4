"""The demo's main job, run by the command line."""

from __future__ import annotations

import csv
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.kit import ROOT
from tests.kit.cli import vmjobs
from tests.kit.grid import Grid, wait_for
from vmjobs.model import BYTE_COUNTERS, MIB, JobState


def test_minimum_bias_events_from_an_array_of_vms(grid: Grid, tmp_path: Path) -> None:
    submitted = vmjobs(
        "job", "submit", "--json", "--wait", "--image", "hep", "--memory", "512", "--array", "3",
        "--input", f"card.cmnd={ROOT / 'examples' / 'minbias.cmnd'}", "--output", "hist-*.csv",
        str(ROOT / "examples" / "minbias.sh"),
    )  # fmt: skip
    jobs = submitted.json
    assert [job["state"] for job in jobs] == ["COMPLETED"] * 3
    assert {job["exit"]["channel"] for job in jobs} == {"endpoint"}
    vmjobs("job", "outputs", jobs[0]["array"], "--fetch", tmp_path, code=0)
    parts = sorted(tmp_path.glob("*/hist-*.csv"))
    assert [p.name for p in parts] == ["hist-1000.csv", "hist-1001.csv", "hist-1002.csv"]
    merge = [
        sys.executable,
        str(ROOT / "examples" / "merge.py"),
        str(tmp_path / "sum"),
        *map(str, parts),
    ]
    subprocess.run(merge, check=True, timeout=100)
    with (tmp_path / "sum.csv").open() as file:
        assert sum(int(row["events"]) for row in csv.DictReader(file)) == 900
    assert (tmp_path / "sum.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_job_used_is_known_to_the_api_and_to_htcondor(grid: Grid) -> None:
    script = """#!/bin/sh
        dd if=/dev/zero of=filled bs=1M count=40 conv=fsync
        end=$(($(date +%s) + 4)); while [ $(date +%s) -lt $end ]; do :; done
        n=0; while [ $n -lt 3000000 ]; do n=$((n + 1)); done  # work, however busy the host is
        head -c 100000 /dev/zero >kept
    """
    (job,) = grid.submit(script, outputs=["kept"])
    (ended,) = grid.wait(job)
    assert ended.state is JobState.COMPLETED, ended.reason
    assert ended.cpu_seconds > 1
    assert 40 * MIB < ended.bytes["memory"] <= job.spec.memory * MIB
    assert ended.bytes["disk"] > 40 * MIB
    assert ended.bytes["output"] == 100_000
    assert set(ended.bytes) == set(BYTE_COUNTERS) - {"checkpoint"}
    asked = ["-constraint", f'VMJobsId == "{job.id}"', "-af"]
    asked += ("ChirpVMCpuSeconds", "ChirpVMMemoryBytes", "ChirpVMOutputBytes", "MemoryUsage")
    asked += ("ChirpVMState", "ChirpVMBootSeconds", "ExitCode")
    for host in ("site", "submit"):
        shown = wait_for(
            partial(lambda h: grid.on(h, "condor_history", *asked).split(), host),
            f"the job to be in the history of {host}",
            180,
        )
        assert float(shown[0]) == ended.cpu_seconds
        assert [int(word) for word in shown[1:3]] == [ended.bytes["memory"], 100_000]
        assert int(shown[3]) == -(-ended.bytes["memory"] // MIB)
        assert shown[4] in {"RUNNING", "COLLECTING", "COMPLETED"}
        assert (float(shown[5]) > 0, shown[6]) == (True, "0")
    table = vmjobs("job", "status", job.id).out
    assert f"{ended.cpu_seconds:.1f} s" in table
    assert "output 100000" in table
