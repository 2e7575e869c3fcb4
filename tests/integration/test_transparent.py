"""Transparent jobs: one more line runs an ordinary job in a VM, with the same result.

Most jobs are submitted together; each test checks one of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.grid import Grid, wait_for
from tests.kit.submit_host import (
    HOPS,
    ON_A_NODE,
    PATIENT,
    Desk,
    Kind,
    Submitted,
    run_dag,
    site,
    submitted,
    why,
)
from vmjobs.model import MIB

__all__ = ["site"]

UNCHANGED = Kind(
    """
        printf '<%s>' "$@"; echo; echo "$GREETING"; cat data; id -un; uname -a
        tr '\\0' '\\n' </proc/$$/environ >all
        grep -c -e ^ODD.NAME=dot -e ^_CONDOR_SLOT= -e ^_CONDOR_JOB_AD= all
        grep -ci '^ClusterId' .job.ad; grep -ci '^Memory =' .machine.ad
        echo result >made; echo again >>data; echo problem >&2; exit 3
    """,
    arguments="\"'it''s' 'a  b' $$ '' \"\"x\"\"\"",
    lines={"transfer_output_files": "made,data", "__Mine": "42"},
)
USES = Kind(
    """
        dd if=/dev/zero of=filled bs=1M count=40 conv=fsync 2>/dev/null
        end=$(($(date +%s) + 4)); while [ $(date +%s) -lt $end ]; do :; done
        n=0; while [ $n -lt 3000000 ]; do n=$((n + 1)); done  # work, however busy the host is
        echo worked; rm filled; head -c 3000000 /dev/urandom >kept
    """,
    lines={"transfer_output_files": "kept"},
)
KINDS = {
    ("site", "unchanged"): UNCHANGED,
    ("submit", "unchanged"): UNCHANGED,
    ("submit", "uses"): USES,
    ("site", "released"): Kind("echo ran", image="no-such-image"),
}
STEPS = ("Stage", "Boot", "Run", "Collect")
Jobs = Submitted[tuple[str, str]]


@pytest.fixture(scope="module")
def jobs(grid: Grid) -> Iterator[Jobs]:
    with submitted(
        {key: (Desk(grid, key[0], HOPS[key[0]]), job) for key, job in KINDS.items()}
    ) as made:
        yield made


@pytest.mark.parametrize("host", HOPS)
def test_a_job_runs_unchanged(jobs: Jobs, host: str) -> None:
    desk, cluster = jobs[host, "unchanged"]
    ad = desk.ended(cluster)
    assert ad["JobStatus"] == 4, ad.get("HoldReason")
    assert ad["ExitCode"] == 3
    assert ad["ExitBySignal"] is False
    # Events in the job's log: STAGING, BOOTING, RUNNING, COLLECTING, FAILED. Condor-C's log has none.
    assert desk.changes() == ["ChirpVMState"] * (5 if desk.host == "site" else 0)
    assert all(ad[f"ChirpVM{step}Seconds"] > 0 for step in STEPS)
    out = desk.read("out").splitlines()
    assert out[:4] == ['<it\'s><a  b><$$><><"x">', "two words", "from a file", "physicist"]
    assert "Linux vmjob-0 " in out[4]
    assert out[5:] == ["3", "1", "1"]
    assert desk.read("err") == "problem\n"
    assert desk.read("made") == "result\n"
    assert desk.read("data") == "from a file\nagain\n"
    # The job's record says how it ended.
    assert desk.shown(cluster) == ("FAILED", "JOB_FAILED: the job exited with status 3")
    (finding,) = why(desk, cluster)["findings"]
    assert (finding["code"], finding["message"]) == ("COMPLETED", "it has ended, with status 3")


#: Attributes of the ads in a job's directory that stay the same.
OF_THE_JOB = ("Owner", "Cmd", "Iwd", "RequestMemory", "Environment")
OF_THE_MACHINE = ("Arch", "OpSysAndVer")


def test_it_finds_what_a_job_without_a_vm_finds(site: Desk) -> None:
    """The job sees the same variables, files, user, directory and ads as without a VM.

    .update.ad is an exception: a starter writes it when it next updates its shadow.
    """
    script = f"""
        env | cut -d = -f 1 | grep -v -x -e SHLVL -e _ | sed 's/_[0-9]*$//' | sort
        find . -mindepth 1 ! -name '_condor_std*' ! -name .update.ad -printf '%P %y %m %U\\n' | sort
        id; echo "$_CONDOR_SCRATCH_DIR" | tr -d 0-9
        here() {{ sed "s,$_CONDOR_SCRATCH_DIR,DIR,g"; }}
        env | grep ^_CONDOR_ | here | sed 's/[0-9][0-9]*/N/g' | LC_ALL=C sort
        for name in {" ".join(OF_THE_JOB)}; do grep -i "^$name = " "$_CONDOR_JOB_AD" | here; done
        for name in {" ".join(OF_THE_MACHINE)}; do grep -i "^$name = " "$_CONDOR_MACHINE_AD"; done
        [ "$PWD" = "$_CONDOR_SCRATCH_DIR" ] && echo there
    """
    more = {"environment": "\"A=1 B='two words'\"", "requirements": ON_A_NODE}
    clusters = [site.submit(script, image, output=f"out.{image}", **more) for image in ("generic", "")]
    for cluster in clusters:
        site.succeeded(cluster)
    found = site.read("out.generic")
    assert found == site.read("out.")
    said = [line.partition(" = ")[0].lower() for line in found.splitlines() if " = " in line]
    assert said == [name.lower() for name in (*OF_THE_JOB, *OF_THE_MACHINE)], found
    assert "\n_CONDOR_SCRATCH_DIR=DIR\n" in found


def test_what_the_vm_used_is_in_the_jobs_ad(jobs: Jobs) -> None:
    """Checked at the origin, a hop of Condor-C away."""
    desk, cluster = jobs["submit", "uses"]
    ad = desk.ended(cluster)
    assert ad["JobStatus"] == 4, ad.get("HoldReason")
    assert 2 < ad["ChirpVMCpuSeconds"] < 2 * sum(ad[f"ChirpVM{step}Seconds"] for step in STEPS)
    asked = ad["MemoryProvisioned"] * MIB
    assert 40 * MIB < ad["ChirpVMMemoryBytes"] <= asked
    assert ad["ChirpVMDiskBytes"] > 40 * MIB
    assert ad["ChirpVMInputBytes"] > len(USES.script)
    assert ad["ChirpVMOutputBytes"] > 3_000_000
    assert ad["ChirpVMLogBytes"] == len("worked\n")
    assert ad["ChirpVMConsoleBytes"] > 0
    assert ad["ChirpVMImageBytes"] >= 0
    # HTCondor's own attribute, an expression there; a Condor-C job may stay in the queue for a moment.
    ask = ("-af", "MemoryUsage")
    shown = desk("condor_q", cluster, *ask) or desk("condor_history", cluster, "-limit", "1", *ask)
    assert int(shown) == -(-ad["ChirpVMMemoryBytes"] // MIB)


def test_a_released_job_runs(jobs: Jobs) -> None:
    desk, cluster = jobs["site", "released"]
    ad = desk.ended(cluster)
    assert (ad["JobStatus"], ad["HoldReasonSubCode"]) == (5, 101), ad
    desk("condor_qedit", cluster, "VMJobImage", '"generic"')
    desk("condor_release", cluster)
    ad = wait_for(lambda: desk.ad(cluster, ended=True) or None, "the job to end", PATIENT)
    assert (ad["JobStatus"], ad["ExitCode"]) == (4, 0)


def test_a_dag_with_scripts_around_its_jobs(site: Desk) -> None:
    run_dag(site)
