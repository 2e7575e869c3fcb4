"""Jobs of people who know HTCondor alone: with one more line they run in a machine."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from grid_kit import NODES, PATIENCE, Grid, wait_for

from vmjobs.model import MIB

#: A job's way from the queue to its end, on a machine that has more to do.
PATIENT = 240.0 * PATIENCE
#: What the agent says on its node.
LOG = "/var/log/condor/VMJobsAgentLog"
SUBMIT = """
executable = job.sh
arguments = {arguments}
environment = "GREETING='two words' ODD.NAME=dot"
transfer_input_files = data
output = out
error = err
log = log
should_transfer_files = YES
when_to_transfer_output = ON_EXIT
request_memory = 128
request_disk = 64MB
{more}
"""
#: Not in a machine of another test's cluster.
ON_A_NODE = "isUndefined(TARGET.VMJobsCluster)"
#: What makes a job leave by Condor-C for the site.
BY_CONDOR_C = """
universe = grid
grid_resource = condor site.grid site.grid
+remote_ShouldTransferFiles = "YES"
+remote_WhenToTransferOutput = "ON_EXIT"
"""


@dataclass
class Desk:
    """A physicist's shell on a host with a schedd."""

    grid: Grid
    host: str
    extra: str = ""
    folder: str = field(default_factory=lambda: f"/run/lock/unchanged-{uuid.uuid4().hex}")
    clusters: list[str] = field(default_factory=list)

    def __call__(self, *command: str, check: bool = True) -> str:
        return self.grid.on(self.host, *command, user="vmjobs", check=check)

    def write(self, name: str, text: str) -> None:
        self("sh", "-c", 'printf %s "$1" >"$2"', "sh", text, f"{self.folder}/{name}")

    def submit(self, script: str, image: str = "generic", arguments: str = "", **more: str) -> str:
        """Submit a shell script as a job; the cluster's number. more: lines of the submit file."""
        self.describe(script, image, arguments, **more)
        return self.tool("condor_submit", "-terse", "job.sub").split(".")[0].strip()

    def tool(self, *command: str) -> str:
        """Run a tool of HTCondor's in the folder: names in submit files are relative to that."""
        answer = self("sh", "-c", 'cd "$1" && shift && "$@"', "sh", self.folder, *command)
        found = re.search(r"^(\d+)\.|to cluster (\d+)\.", answer, re.MULTILINE)
        if found:
            self.clusters.append(found[1] or found[2])
        return answer

    def describe(
        self,
        script: str,
        image: str = "generic",
        arguments: str = "",
        count: int = 1,
        **more: str,
    ) -> None:
        """Write the submit file of so many jobs."""
        self("mkdir", "-p", self.folder)
        self.write("job.sh", f"#!/bin/sh\n{script}\n")
        self.write("data", "from a file\n")
        lines = [f"{name.replace('__', '+')} = {value}" for name, value in more.items()]
        if image:
            lines.append(f'+VMJobImage = "{image}"')
        text = SUBMIT.format(
            arguments=arguments, more="\n".join([*lines, self.extra, f"queue {count}"])
        )
        self.write("job.sub", text)

    def ad(self, cluster: str, *, ended: bool = False) -> dict[str, Any]:
        """The job's ad; empty where there is none (any more)."""
        tool = ["condor_history", "-limit", "1"] if ended else ["condor_q"]
        listed: list[dict[str, Any]] = json.loads(self(*tool, cluster, "-json") or "[]")
        return listed[0] if listed else {}

    def ended(self, cluster: str) -> dict[str, Any]:
        """The job's ad once it has left the queue, or is held."""

        def look() -> dict[str, Any] | None:
            ad = self.ad(cluster)
            if ad:
                return ad if ad["JobStatus"] in (4, 5) else None
            return self.ad(cluster, ended=True) or None

        return wait_for(look, f"job {cluster} to end at {self.host}", PATIENT)

    def shown(self, cluster: str) -> tuple[str, str]:
        """State and reason, as HTCondor's tools evaluate them: while it runs they are expressions."""
        ask = ("-limit", "1", "-af", "ChirpVMState", "ChirpVMReason")
        said = self("condor_q", cluster, *ask).strip() or self("condor_history", cluster, *ask).strip()
        state, _, reason = said.partition(" ")
        return state, reason

    def running(self, cluster: str) -> dict[str, Any]:
        """The job's ad once its machine runs it."""

        def look() -> dict[str, Any] | None:
            ad = self.ad(cluster)
            assert ad.get("JobStatus") != 5, ad["HoldReason"]
            return ad if self.shown(cluster)[0] == "RUNNING" else None

        return wait_for(look, f"job {cluster} to run", PATIENT)

    def read(self, name: str) -> str:
        return self("cat", f"{self.folder}/{name}")


@pytest.fixture
def site(grid: Grid) -> Iterator[Desk]:
    yield from _desk(Desk(grid, "site"))


@pytest.fixture(params=["site", "submit"])
def desk(grid: Grid, request: pytest.FixtureRequest) -> Iterator[Desk]:
    """At the site itself, and a hop of Condor-C away."""
    yield from _desk(Desk(grid, request.param, BY_CONDOR_C if request.param == "submit" else ""))


def _desk(desk: Desk) -> Iterator[Desk]:
    yield desk
    for cluster in desk.clusters:
        desk("condor_rm", "-forcex", cluster, check=False)
        desk("condor_rm", cluster, check=False)


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
    steps = ("Stage", "Boot", "Run", "Collect")
    assert all(ad[f"ChirpVM{step}Seconds"] > 0 for step in steps)
    out = desk.read("out").splitlines()
    assert out[:4] == ['<it\'s><a  b><$$><><"x">', "two words", "from a file", "vmjobs"]
    assert "Linux vmjob-0 " in out[4]
    assert out[5:] == ["3", "1", "1"]
    assert desk.read("err") == "problem\n"
    assert desk.read("made") == "result\n"
    assert desk.read("data") == "from a file\nagain\n"


#: What stays the same of the ads in a job's directory.
OF_THE_JOB = ("Owner", "Cmd", "Iwd", "RequestMemory", "Environment")
OF_THE_MACHINE = ("Arch", "OpSysAndVer")


def test_it_finds_what_a_job_without_a_machine_finds(site: Desk) -> None:
    """Its variables, its files, who it is, and where; what HTCondor says of it there.

    .update.ad is not one of them: a starter writes it when it next tells its shadow of the job.
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


def test_what_the_machine_used_is_in_the_jobs_ad(desk: Desk) -> None:
    """At the site, and a hop of Condor-C away."""
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
    # HTCondor's own, an expression there; a job that went by Condor-C may be in the queue for a moment.
    ask = ("-af", "MemoryUsage")
    shown = desk("condor_q", cluster, *ask) or desk("condor_history", cluster, "-limit", "1", *ask)
    assert int(shown) == -(-ad["ChirpVMMemoryBytes"] // MIB)


def test_what_the_machine_uses_is_seen_while_it_runs(site: Desk) -> None:
    """Without an event in the job's log each time."""
    cluster = site.submit("while :; do :; done")
    site.running(cluster)
    wait_for(lambda: site.ad(cluster).get("ChirpVMCpuSeconds"), "its usage to be in the queue", PATIENT)
    assert site.ad(cluster)["ChirpVMMemoryBytes"] > 10 * MIB
    assert "ChirpVMCpuSeconds" not in site.read("log")
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
    """To HTCondor it is the name of an attribute that there is not."""
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


def where(desk: Desk, cluster: str) -> tuple[str, str]:
    """The node on which a job runs, and the agent's name for it."""
    node = desk.running(cluster)["ChirpVMNode"].split(".")[0]
    said = f"grep -o 'condor.[0-9]* is job {cluster}.0 of' {LOG}"
    return node, desk.grid.on(node, "sh", "-c", said).splitlines()[-1].split()[0]


def kill_machine(desk: Desk, cluster: str) -> None:
    """Kill the machine of a job that runs, as a fault of its hypervisor's would."""
    node, name = where(desk, cluster)
    listed = desk.grid.on(
        node, "sh", "-c", f"grep -l '\"{name}\"' /var/lib/vmjobs/agent/runs/*/run.json"
    )
    run = listed.splitlines()[0].split("/")[-2]
    desk.grid.on(node, "pkill", "-9", "-f", f"umid=[^ ]*{run}")


def test_a_machine_that_dies_is_no_end_of_the_job(site: Desk) -> None:
    cluster = site.submit("[ -e data ] && echo begun && sleep 20 && echo ended")
    kill_machine(site, cluster)
    ad = site.ended(cluster)
    assert ad["JobStatus"] == 4, ad.get("HoldReason")
    assert ad["NumJobStarts"] == 2
    assert site.read("out") == "begun\nended\n"


def test_outputs_that_are_missing_hide_no_reason(desk: Desk) -> None:
    """HTCondor looks for what it is to bring back before it looks at anything else."""
    ad = desk.ended(desk.submit("true", image="no-such-image", transfer_output_files="never-made"))
    assert (ad["JobStatus"], ad["HoldReasonSubCode"]) == (5, 101), ad["HoldReason"]


def test_a_machine_that_dies_before_its_output_is_there(site: Desk) -> None:
    cluster = site.submit("sleep 15; echo made >made", transfer_output_files="made")
    kill_machine(site, cluster)
    ad = site.ended(cluster)
    assert (ad["JobStatus"], ad["ExitCode"], ad["NumJobStarts"]) == (4, 0, 2), ad.get("HoldReason")
    assert site.read("made") == "made\n"


def test_a_job_whose_machines_die_is_not_tried_for_ever(site: Desk) -> None:
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


@pytest.mark.parametrize("image", ["generic", "worker"])
def test_a_job_says_something_by_chirp(desk: Desk, image: str) -> None:
    """The one image has no HTCondor, and the other one has HTCondor's own program."""
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
    assert (ad["JobStatus"], ad["ExitCode"]) == (4, 0), (ad.get("HoldReason"), site.read("err"))
    assert ad["Mine"] == 7
    assert site.read("out") == f"{cluster}\nfrom a file\n"
    assert site.read("data.again") == "from a file\n"
    assert "a note" in site.read("log")


def test_condor_ssh_to_job_leads_into_the_machine(site: Desk) -> None:
    cluster = site.submit("echo begun; sleep 1000")
    site.running(cluster)
    command = 'uname -n; cat data; id -un; echo "$GREETING"; exit 5'
    answer = site(
        "sh", "-c", 'condor_ssh_to_job -auto-retry "$1" "$2"; echo $?', "sh", cluster, command
    )
    lines = answer.splitlines()
    assert lines[-5:] == ["vmjob-0", "from a file", "vmjobs", "two words", "5"], answer
    # In a terminal.
    terminal = ("condor_ssh_to_job", "-ssh", "ssh -tt")
    shown = site(*terminal, cluster, "tty; uname -n; exit 6", check=False)
    assert "/dev/pts/" in shown
    assert "vmjob-0" in shown


def test_the_console_of_a_running_job_is_shown(site: Desk) -> None:
    cluster = site.submit("echo begun; sleep 30")
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


def test_a_removed_job_takes_its_machine_along(site: Desk) -> None:
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
    time.sleep(1)  # what it has said before is on its way
    said = site.read("out")
    time.sleep(3)  # fifteen numbers, if it went on
    assert site.read("out") == said
    assert len(said.split()) < 80
    site("condor_continue", cluster)
    ad = site.ended(cluster)
    assert (ad["JobStatus"], ad["ExitCode"], ad["NumJobStarts"]) == (4, 0, 1)
    assert site.read("out").split() == [str(n) for n in range(1, 81)]


def run_dag(desk: Desk) -> None:
    """Run two jobs, of which the second has what the first made, with scripts around them."""
    script = 'if [ "$1" = A ]; then echo of A >made; else cat made; fi; uname -n'
    desk.describe(
        script, arguments="$(node)", transfer_input_files="data $(made)", output="out.$(node)"
    )
    desk.write(
        "graph",
        """
JOB A job.sub
JOB B job.sub
VARS A node="A" made=""
VARS B node="B" made=",made"
PARENT A CHILD B
SCRIPT PRE A /bin/touch before
SCRIPT POST B /bin/touch after
RETRY A 1
""",
    )
    ad = desk.ended(re.findall(r"to cluster (\d+)", desk.tool("condor_submit_dag", "graph"))[0])
    assert (ad["JobStatus"], ad["ExitCode"]) == (4, 0), desk.read("graph.dagman.out")[-3000:]
    assert desk.read("out.B").splitlines() == ["of A", "vmjob-0"]
    desk.read("before")
    desk.read("after")


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
