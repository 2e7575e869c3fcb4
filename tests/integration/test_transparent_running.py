"""Transparent jobs while they run: chirp, ssh, console, and kills, evictions, suspensions."""

from __future__ import annotations

import time

import pytest

from tests.kit.grid import NODES, wait_for
from tests.kit.submit_host import LOG, ON_A_NODE, PATIENT, Desk, desk, kill_machine, site, where

__all__ = ["desk", "site"]


def test_a_vm_that_dies_is_no_end_of_the_job(site: Desk) -> None:
    cluster = site.submit("[ -e data ] && echo begun && sleep 20 && echo ended")
    kill_machine(site, cluster)
    ad = site.ended(cluster)
    assert ad["JobStatus"] == 4, ad.get("HoldReason")
    assert ad["NumJobStarts"] == 2
    assert site.read("out") == "begun\nended\n"


def test_a_vm_that_dies_before_its_output_is_there(site: Desk) -> None:
    cluster = site.submit("sleep 15; echo made >made", transfer_output_files="made")
    kill_machine(site, cluster)
    ad = site.ended(cluster)
    assert (ad["JobStatus"], ad["ExitCode"], ad["NumJobStarts"]) == (4, 0, 2), ad.get("HoldReason")
    assert site.read("made") == "made\n"


def test_a_job_whose_vms_die_is_not_tried_for_ever(site: Desk) -> None:
    cluster = site.submit("sleep 1000", __VMJobMaxStarts="1")
    kill_machine(site, cluster)
    ad = site.ended(cluster)
    assert (ad["JobStatus"], ad["HoldReasonSubCode"]) == (5, 123)
    assert ad["HoldReason"].startswith("GUEST_LOST: ")


def test_what_runs_the_job_on_its_node_is_killed(site: Desk) -> None:
    cluster = site.submit("echo begun; sleep 15; echo ended")
    node, name = where(site, cluster)
    starter = name.partition(".")[2]
    site.grid.on(node, "pkill", "-9", "-P", starter, "-f", "exec-unchanged")
    ad = site.ended(cluster)
    assert (ad["JobStatus"], ad["ExitCode"], ad["NumJobStarts"]) == (4, 0, 2)
    assert site.read("out") == "begun\nended\n"


def test_what_a_job_prints_is_there_while_it_runs(site: Desk) -> None:
    cluster = site.submit("echo early; sleep 1000")
    site.running(cluster)
    wait_for(lambda: "early" in site("condor_tail", cluster, check=False) or None, "condor_tail", 60)


@pytest.mark.parametrize(
    ("desk", "image"), [("site", "worker"), ("submit", "generic")], indirect=["desk"]
)
def test_a_job_says_something_by_chirp(desk: Desk, image: str) -> None:
    """generic has no HTCondor; worker has HTCondor's own condor_chirp."""
    script = """
        chirp=/usr/libexec/condor/condor_chirp
        $chirp set_job_attr_delayed ChirpMine '"two words"'
        $chirp set_job_attr Mine 1 >/dev/null 2>&1 && echo more than it asked for
        exit 0
    """
    ad = desk.ended(desk.submit(script, image=image))
    assert (ad["JobStatus"], ad["ExitCode"]) == (4, 0), ad.get("HoldReason")
    assert ad["ChirpMine"] == "two words"
    assert desk.read("out") == ""


@pytest.mark.parametrize("image", ["generic", "worker"])
def test_a_job_does_by_chirp_what_it_asked_for(site: Desk, image: str) -> None:
    script = """
        set -e
        chirp=/usr/libexec/condor/condor_chirp
        $chirp get_job_attr ClusterId
        $chirp set_job_attr Mine 7
        $chirp fetch data here
        $chirp put here data.again
        $chirp ulog 'a note'
        cat here
    """
    cluster = site.submit(script, image=image, __WantIOProxy="true")
    ad = site.ended(cluster)
    assert (ad["JobStatus"], ad.get("ExitCode")) == (4, 0), ad.get("HoldReason")
    assert ad["Mine"] == 7
    assert site.read("out") == f"{cluster}\nfrom a file\n"
    assert site.read("data.again") == "from a file\n"
    assert "a note" in site.read("log")


def test_condor_ssh_to_job_leads_into_the_vm(site: Desk) -> None:
    cluster = site.submit("echo begun; sleep 1000")
    site.running(cluster)
    command = 'uname -n; cat data; id -un; echo "$GREETING"; exit 5'
    answer = site(
        "sh", "-c", 'condor_ssh_to_job -auto-retry "$1" "$2"; echo $?', "sh", cluster, command
    )
    lines = answer.splitlines()
    assert lines[-5:] == ["vmjob-0", "from a file", "physicist", "two words", "5"], answer
    # With a terminal.
    terminal = ("condor_ssh_to_job", "-ssh", "ssh -tt")
    shown = site(*terminal, cluster, "tty; uname -n; exit 6", check=False)
    assert "/dev/pts/" in shown
    assert "vmjob-0" in shown


def test_the_console_of_a_running_job_is_shown(site: Desk) -> None:
    cluster = site.submit("echo begun; sleep 90")
    site.running(cluster)
    shown = site("vmjobs", "job", "console", cluster)
    assert "ready" in shown
    followed = site("vmjobs", "job", "console", "-f", f"{cluster}.0", "--offset", str(len(shown)))
    assert "exit code=0" in followed
    assert "ready" not in followed
    assert site.ended(cluster)["ExitCode"] == 0


def test_condor_ssh_to_job_leads_to_other_jobs_as_ever(site: Desk) -> None:
    cluster = site.submit("echo begun; sleep 1000", image="", requirements=ON_A_NODE)
    wait_for(lambda: site.ad(cluster).get("JobStatus") == 2 or None, "the job to run", PATIENT)
    answer = site("condor_ssh_to_job", "-auto-retry", cluster, "hostname; cat data")
    assert answer.splitlines()[-1] == "from a file", answer
    assert answer.splitlines()[-2].split(".")[0] in NODES


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


def test_a_removed_job_takes_its_vm_along(site: Desk) -> None:
    cluster = site.submit("sleep 1000")
    node, name = where(site, cluster)
    site("condor_rm", cluster)
    runs = f"! grep -q '\"{name}\"' /var/lib/vmjobs/agent/runs/*/run.json && echo gone"
    wait_for(
        lambda: "gone" in site.grid.on(node, "sh", "-c", runs, check=False) or None,
        "the machine to go",
        60,
    )


@pytest.mark.soak_for("qemu")
@pytest.mark.parametrize("hypervisor", ["uml", "qemu"])
def test_a_suspended_job_stands_still(site: Desk, hypervisor: str) -> None:
    script = "n=0; while [ $n -lt 80 ]; do n=$((n + 1)); echo $n; sleep 0.2; done"
    lines = {"__VMJobHypervisor": f'"{hypervisor}"', "request_memory": "192", "stream_output": "true"}
    cluster = site.submit(script, **lines)
    node, name = where(site, cluster)
    wait_for(lambda: site.read("out") or None, "it to count", PATIENT)
    site("condor_suspend", cluster)
    wait_for(
        lambda: f"{name} is suspended" in site.grid.on(node, "tail", "-n", "50", LOG) or None,
        "the machine to stand still",
        30,
    )
    time.sleep(1)  # earlier output is on its way
    said = site.read("out")
    time.sleep(3)  # fifteen numbers, if it were running
    assert site.read("out") == said
    assert len(said.split()) < 80
    site("condor_continue", cluster)
    ad = site.ended(cluster)
    assert (ad["JobStatus"], ad["ExitCode"], ad["NumJobStarts"]) == (4, 0, 1)
    assert site.read("out").split() == [str(n) for n in range(1, 81)]
