"""Transparent jobs while they run: chirp, ssh, console, and kills, evictions, suspensions."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.kit.grid import NODES, Grid, wait_for
from tests.kit.submit_host import (
    HOPS,
    LOG,
    ON_A_NODE,
    PATIENT,
    Desk,
    Kind,
    Submitted,
    kill_machine,
    site,
    submitted,
    where,
)
from vmjobs.model import MIB

__all__ = ["site"]

SAYS = """
    chirp=/usr/libexec/condor/condor_chirp
    $chirp set_job_attr_delayed ChirpMine '"two words"'
    $chirp set_job_attr Mine 1 >/dev/null 2>&1 && echo more than it asked for
    exit 0
"""
DOES = """
    set -e
    chirp=/usr/libexec/condor/condor_chirp
    $chirp get_job_attr ClusterId
    $chirp set_job_attr Mine 7
    $chirp fetch data here
    $chirp put here data.again
    $chirp ulog 'a note'
    cat here
"""
ENDS_AT_ITS_SECOND_START = """
    set -e
    [ -e data ]; echo begun
    [ "$(grep -c '^NumJobStarts = [1-9]' .job.ad)" = 1 ] || sleep 1000
    echo made >made; echo ended
"""
ASKS = {"__WantIOProxy": "true"}
#: generic has no HTCondor; worker has HTCondor's own condor_chirp.
KINDS = {
    ("site", "stays"): Kind("echo early; until [ -e over ]; do sleep 0.5; done"),
    ("site", "killed"): Kind(ENDS_AT_ITS_SECOND_START, lines={"transfer_output_files": "made"}),
    ("site", "no VM"): Kind("echo begun; sleep 1000", "", lines={"requirements": ON_A_NODE}),
    ("site", "says"): Kind(SAYS, "worker"),
    ("submit", "says"): Kind(SAYS),
    ("site", "generic"): Kind(DOES, lines=ASKS),
    ("site", "worker"): Kind(DOES, "worker", lines=ASKS),
}
Jobs = Submitted[tuple[str, str]]


@pytest.fixture(scope="module")
def jobs(grid: Grid) -> Iterator[Jobs]:
    desks = {key: Desk(grid, key[0], HOPS[key[0]]) for key in KINDS}
    with submitted({key: (desks[key], job) for key, job in KINDS.items()}) as made:
        yield made


def test_what_a_job_prints_and_uses_is_seen_while_it_runs(jobs: Jobs) -> None:
    """Usage updates cause no events in the job's log."""
    desk, cluster = jobs["site", "stays"]
    desk.running(cluster)
    wait_for(lambda: "early" in desk("condor_tail", cluster, check=False) or None, "condor_tail", 60)
    wait_for(lambda: desk.ad(cluster).get("ChirpVMCpuSeconds"), "its usage to be in the queue", PATIENT)
    assert desk.ad(cluster)["ChirpVMMemoryBytes"] > 10 * MIB
    assert desk.changes() == ["ChirpVMState"] * 3, "STAGING, BOOTING, RUNNING"


def test_condor_ssh_to_job_leads_into_the_vm(jobs: Jobs) -> None:
    desk, cluster = jobs["site", "stays"]
    desk.running(cluster)
    command = 'uname -n; cat data; id -un; echo "$GREETING"; exit 5'
    answer = desk(
        "sh", "-c", 'condor_ssh_to_job -auto-retry "$1" "$2"; echo $?', "sh", cluster, command
    )
    lines = answer.splitlines()
    assert lines[-5:] == ["vmjob-0", "from a file", "physicist", "two words", "5"], answer
    # With a terminal.
    terminal = ("condor_ssh_to_job", "-ssh", "ssh -tt")
    shown = desk(*terminal, cluster, "tty; uname -n; exit 6", check=False)
    assert "/dev/pts/" in shown
    assert "vmjob-0" in shown


def test_condor_ssh_to_job_leads_to_other_jobs_as_ever(jobs: Jobs) -> None:
    desk, cluster = jobs["site", "no VM"]
    wait_for(lambda: desk.ad(cluster).get("JobStatus") == 2 or None, "the job to run", PATIENT)
    answer = desk("condor_ssh_to_job", "-auto-retry", cluster, "hostname; cat data")
    assert answer.splitlines()[-1] == "from a file", answer
    assert answer.splitlines()[-2].split(".")[0] in NODES


def test_the_console_of_a_running_job_is_shown(jobs: Jobs) -> None:
    """This ends the job."""
    desk, cluster = jobs["site", "stays"]
    desk.running(cluster)
    shown = desk("vmjobs", "job", "console", cluster)
    assert "ready" in shown
    # The job ends once the last byte that was there has come.
    follow = """
        vmjobs job console -f "$1.0" --offset "$2" >"$3" &
        until [ -s "$3" ] || ! kill -0 $!; do sleep 0.2; done
        condor_ssh_to_job -auto-retry "$1" 'touch over' >/dev/null 2>&1
        wait $! && cat "$3"
    """
    place = f"{desk.folder}/followed"
    followed = desk("sh", "-c", follow, "sh", cluster, str(len(shown) - 1), place)
    assert "exit code=0" in followed
    assert "ready" not in followed
    assert desk.ended(cluster)["ExitCode"] == 0


@pytest.mark.parametrize("host", HOPS)
def test_a_job_says_something_by_chirp(jobs: Jobs, host: str) -> None:
    desk, cluster = jobs[host, "says"]
    ad = desk.succeeded(cluster)
    assert ad["ChirpMine"] == "two words"
    assert desk.read("out") == ""


@pytest.mark.parametrize("image", ["generic", "worker"])
def test_a_job_does_by_chirp_what_it_asked_for(jobs: Jobs, image: str) -> None:
    desk, cluster = jobs["site", image]
    ad = desk.succeeded(cluster)
    assert ad["Mine"] == 7
    assert desk.read("out") == f"{cluster}\nfrom a file\n"
    assert desk.read("data.again") == "from a file\n"
    assert "a note" in desk.read("log")


def test_a_vm_that_dies_before_its_output_is_there_is_no_end_of_the_job(jobs: Jobs) -> None:
    desk, cluster = jobs["site", "killed"]
    kill_machine(desk, cluster)
    ad = desk.ended(cluster)
    assert (ad["JobStatus"], ad["ExitCode"], ad["NumJobStarts"]) == (4, 0, 2), ad.get("HoldReason")
    assert desk.read("out") == "begun\nended\n"
    assert desk.read("made") == "made\n"


def test_a_vacated_job_goes_on_with_what_it_has_saved(site: Desk) -> None:
    script = """
        n=$(cat state 2>/dev/null || echo 0)
        trap 'echo $n >state; exit 0' TERM
        echo "from $n"
        while [ $n -lt 40 ]; do n=$((n + 1)); sleep 0.5; done
        echo "to $n" | tee state
    """
    more = {"when_to_transfer_output": "ON_EXIT_OR_EVICT", "transfer_output_files": "state"}
    cluster = site.submit(script, **more)
    site.running(cluster)
    wait_for(lambda: "from 0" in site("condor_tail", cluster, check=False) or None, "its word", PATIENT)
    site("condor_vacate_job", cluster)
    ended = site.ended(cluster)
    assert (ended["ExitCode"], ended["NumJobStarts"]) == (0, 2)
    first, last = site.read("out").splitlines()
    assert first.startswith("from ") and 0 < int(first.split()[1]) < 40
    assert last == "to 40"


@pytest.mark.soak_for("qemu")
@pytest.mark.parametrize("hypervisor", ["uml", "qemu"])
def test_a_suspended_job_stands_still(site: Desk, hypervisor: str) -> None:
    script = "n=0; while [ $n -lt 200 ]; do n=$((n + 1)); echo $n; sleep 0.2; done"
    lines = {"__VMJobHypervisor": f'"{hypervisor}"', "request_memory": "192", "stream_output": "true"}
    cluster = site.submit(script, **lines)
    node, name = where(site, cluster)
    wait_for(lambda: site.read("out") or None, "it to count", PATIENT)
    site("condor_suspend", cluster)
    wait_for(
        lambda: f"{name} is suspended" in site.grid.on(node, "tail", "-n", "50", LOG) or None,
        "the machine to stand still",
        60,
    )

    def stands() -> str | None:
        said = site.read("out")
        time.sleep(3)  # fifteen numbers, if it were running
        return said if site.read("out") == said else None

    said = wait_for(stands, "the last output to have come", 60)
    assert len(said.split()) < 200
    site("condor_continue", cluster)
    ad = site.ended(cluster)
    assert (ad["JobStatus"], ad["ExitCode"], ad["NumJobStarts"]) == (4, 0, 1)
    assert site.read("out").split() == [str(n) for n in range(1, 201)]
