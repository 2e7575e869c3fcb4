"""Transparent jobs: one more line runs an ordinary job in a VM, with the same result."""

from __future__ import annotations

import time

from tests.kit.grid import NODES, wait_for
from tests.kit.submit_host import ON_A_NODE, PATIENT, Desk, desk, run_dag, site
from vmjobs.model import MIB

__all__ = ["desk", "site"]


def test_a_job_runs_unchanged(desk: Desk) -> None:
    script = """
        printf '<%s>' "$@"; echo; echo "$GREETING"; cat data; id -un; uname -a
        tr '\\0' '\\n' </proc/$$/environ >all
        grep -c -e ^ODD.NAME=dot -e ^_CONDOR_SLOT= -e ^_CONDOR_JOB_AD= all
        grep -ci '^ClusterId' .job.ad; grep -ci '^Memory =' .machine.ad
        echo result >made; echo again >>data; echo problem >&2; exit 3
    """
    words = "\"'it''s' 'a  b' $$ '' \"\"x\"\"\""
    cluster = desk.submit(script, arguments=words, transfer_output_files="made,data", __Mine="42")
    ad = desk.ended(cluster)
    assert ad["JobStatus"] == 4, ad.get("HoldReason")
    assert ad["ExitCode"] == 3
    assert ad["ExitBySignal"] is False
    # Events in the job's log: STAGING, BOOTING, RUNNING, COLLECTING, FAILED. Condor-C's log has none.
    assert desk.changes() == ["ChirpVMState"] * (5 if desk.host == "site" else 0)
    steps = ("Stage", "Boot", "Run", "Collect")
    assert all(ad[f"ChirpVM{step}Seconds"] > 0 for step in steps)
    out = desk.read("out").splitlines()
    assert out[:4] == ['<it\'s><a  b><$$><><"x">', "two words", "from a file", "physicist"]
    assert "Linux vmjob-0 " in out[4]
    assert out[5:] == ["3", "1", "1"]
    assert desk.read("err") == "problem\n"
    assert desk.read("made") == "result\n"
    assert desk.read("data") == "from a file\nagain\n"


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
        ad = site.ended(cluster)
        assert (ad["JobStatus"], ad.get("ExitCode")) == (4, 0), ad.get("HoldReason")
    found = site.read("out.generic")
    assert found == site.read("out.")
    said = [line.partition(" = ")[0].lower() for line in found.splitlines() if " = " in line]
    assert said == [name.lower() for name in (*OF_THE_JOB, *OF_THE_MACHINE)], found
    assert "\n_CONDOR_SCRATCH_DIR=DIR\n" in found


def test_what_the_vm_used_is_in_the_jobs_ad(desk: Desk) -> None:
    """Checked at the site, and a hop of Condor-C away."""
    script = """
        dd if=/dev/zero of=filled bs=1M count=40 conv=fsync 2>/dev/null
        end=$(($(date +%s) + 4)); while [ $(date +%s) -lt $end ]; do :; done
        echo worked; rm filled; head -c 3000000 /dev/urandom >kept
    """
    began = time.monotonic()
    cluster = desk.submit(script, transfer_output_files="kept")
    ad = desk.ended(cluster)
    assert ad["JobStatus"] == 4, ad.get("HoldReason")
    assert 2 < ad["ChirpVMCpuSeconds"] < 2 * (time.monotonic() - began)
    asked = ad["MemoryProvisioned"] * MIB
    assert 40 * MIB < ad["ChirpVMMemoryBytes"] <= asked
    assert ad["ChirpVMDiskBytes"] > 40 * MIB
    assert ad["ChirpVMInputBytes"] > len(script)
    assert ad["ChirpVMOutputBytes"] > 3_000_000
    assert ad["ChirpVMLogBytes"] == len("worked\n")
    assert ad["ChirpVMConsoleBytes"] > 0
    assert ad["ChirpVMImageBytes"] >= 0
    # HTCondor's own attribute, an expression there; a Condor-C job may stay in the queue for a moment.
    ask = ("-af", "MemoryUsage")
    shown = desk("condor_q", cluster, *ask) or desk("condor_history", cluster, "-limit", "1", *ask)
    assert int(shown) == -(-ad["ChirpVMMemoryBytes"] // MIB)


def test_what_the_vm_uses_is_seen_while_it_runs(site: Desk) -> None:
    """Usage updates cause no events in the job's log."""
    cluster = site.submit("while :; do :; done")
    site.running(cluster)
    wait_for(lambda: site.ad(cluster).get("ChirpVMCpuSeconds"), "its usage to be in the queue", PATIENT)
    assert site.ad(cluster)["ChirpVMMemoryBytes"] > 10 * MIB
    assert site.changes() == ["ChirpVMState"] * 3, "STAGING, BOOTING, RUNNING"
    site("condor_rm", cluster)


def test_what_is_streamed_to_a_job(site: Desk) -> None:
    cluster = site.submit("cat; echo end", input="data", stream_input="true")
    ad = site.ended(cluster)
    assert (ad["JobStatus"], ad["ExitCode"]) == (4, 0), ad.get("HoldReason")
    assert site.read("out") == "from a file\nend\n"


def test_a_job_that_kills_itself(site: Desk) -> None:
    ad = site.ended(site.submit("kill -ABRT $$"))
    assert (ad["ExitBySignal"], ad["ExitSignal"]) == (True, 6)


def test_an_image_that_is_not_there_is_a_hold_with_a_reason(desk: Desk) -> None:
    ad = desk.ended(desk.submit("true", image="no-such-image"))
    assert ad["JobStatus"] == 5
    assert ad["HoldReasonSubCode"] == 101, ad
    assert "no-such-image" in ad["HoldReason"]


def test_what_the_job_asks_for_cannot_be(site: Desk) -> None:
    ad = site.ended(site.submit("true", __VMJobHypervisor='"abacus"', __VMJobBootTimeout="0"))
    assert ad["HoldReasonSubCode"] == 104
    assert "VMJobHypervisor" in ad["HoldReason"]
    assert "VMJobBootTimeout" in ad["HoldReason"]


def test_an_image_without_quotes_is_a_hold_that_says_what_to_write(desk: Desk) -> None:
    """HTCondor reads the unquoted name as an attribute, which does not exist."""
    ad = desk.ended(desk.submit("true", image="", __VMJobImage="generic"))
    assert (ad["JobStatus"], ad.get("HoldReasonSubCode")) == (5, 104), ad
    assert '+VMJobImage = "generic"' in ad["HoldReason"]


def test_a_released_job_runs(site: Desk) -> None:
    cluster = site.submit("echo ran", image="no-such-image")
    assert site.ended(cluster)["JobStatus"] == 5
    site("condor_qedit", cluster, "VMJobImage", '"generic"')
    site("condor_release", cluster)
    ad = wait_for(lambda: site.ad(cluster, ended=True) or None, "the job to end", PATIENT)
    assert (ad["JobStatus"], ad["ExitCode"]) == (4, 0)


def test_outputs_that_are_missing_hide_no_reason(desk: Desk) -> None:
    """HTCondor checks the files to transfer before all else."""
    ad = desk.ended(desk.submit("true", image="no-such-image", transfer_output_files="never-made"))
    assert (ad["JobStatus"], ad["HoldReasonSubCode"]) == (5, 101), ad["HoldReason"]


def test_a_dag_with_scripts_around_its_jobs(site: Desk) -> None:
    run_dag(site)


def test_max_retries_and_on_exit_hold_are_the_jobs_own(site: Desk) -> None:
    held = site.submit("exit 4", on_exit_hold="ExitCode == 4", on_exit_hold_subcode="77")
    ad = site.ended(held)
    assert (ad["JobStatus"], ad["HoldReasonSubCode"]) == (5, 77)
    ad = site.ended(site.submit("exit 4", max_retries="1"))
    assert (ad["JobStatus"], ad["ExitCode"], ad["NumJobCompletions"]) == (4, 4, 2)


def test_other_jobs_start_as_ever(site: Desk) -> None:
    ad = site.ended(
        site.submit(
            "tr '\\0' '\\n' </proc/$$/environ | grep ^ODD; uname -n; exit 2",
            image="",
            requirements=ON_A_NODE,
        )
    )
    assert ad["ExitCode"] == 2
    out = site.read("out").splitlines()
    assert out[0] == "ODD.NAME=dot"
    assert out[1].split(".")[0] in NODES
