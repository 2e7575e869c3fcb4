"""Jobs that wait at every step of a run at the same time, and assertions that always hold."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest

from tests.kit import KIT, step_gates, step_watch
from tests.kit.faults import room
from tests.kit.grid import NODES, Grid, run, wait_for
from tests.kit.submit_host import LOG, Desk
from vmjobs.agent.node import ANNOUNCE_SECONDS
from vmjobs.errors import Conflict
from vmjobs.model import Job, JobState, StreamName

#: The node on which all jobs run.
NODE = "node1"
#: MiB of memory of a VM, by hypervisor. QEMU also holds firmware and a compressed kernel.
MEMORY = {"uml": 96, "qemu": 128}
KINDS = ("rest", "unchanged")
#: JOBS: one job per step. FEW: as many as two processors can emulate at once.
JOBS = {kind: len(step_gates.points(kind)) for kind in KINDS}
FEW = dict.fromkeys(KINDS, 4)
#: JobLeaseDuration in seconds: the normal one, and one for tests in which the schedd itself dies.
LEASE, LONGER_LEASE = 30, 120
#: Seconds until all jobs wait at their steps, until all have ended, and until all traces are gone.
SETTLED, LATE, CLEAN = 180.0, 400.0, 2 * ANNOUNCE_SECONDS
#: Limit until a guest is ready: all of them at once on two processors, emulated, take three minutes.
BOOT_SECONDS = 400

#: ``JobStatus``, as HTCondor's tools print it.
REMOVED, COMPLETED = "3", "4"

GATES = str(step_gates.GATES)
PACKAGES = "/usr/lib/python3/dist-packages"
PLANTED = f"{PACKAGES}/vmjobs_gates.pth"
WATCH, SEEN = "/run/lock/step_watch.py", str(step_watch.SEEN)

SCRIPT = "echo begun; sleep 3; echo done"
REST = f"#!/bin/sh\n{SCRIPT}; echo result >out.txt\n"
UNCHANGED = f"{SCRIPT}; echo result >out.txt.$1"
#: Lists what VMs and jobs leave on a node: files, mounts, processes.
LEFT = r"""
agent=/var/lib/vmjobs/agent
find $agent/runs $agent/handed /var/lib/condor/execute -mindepth 1 2>/dev/null
find $agent/.config $agent/.cache -name '*vmjobs-*' 2>/dev/null
find /run/vmjobs /dev/shm /tmp -mindepth 1 ! -path '/run/vmjobs/gates*'
cut -d ' ' -f 2 /proc/mounts
pgrep -fa 'umid=|guest=|vmjobs-outside|nbdkit|vmjobs exec|condor_starter' | cut -d ' ' -f 2-
"""


@contextmanager
def planted(grid: Grid) -> Iterator[None]:
    """Install the step gates for the agents that start next on the node."""
    container = grid.container(NODE)
    run("docker", "cp", str(KIT / "step_gates.py"), f"{container}:{PACKAGES}/step_gates.py")
    run("docker", "cp", str(KIT / "step_watch.py"), f"{container}:{WATCH}")
    grid.on(NODE, "sh", "-c", f"echo 'import step_gates' >{PLANTED}")
    try:
        yield
    finally:
        grid.on(NODE, "rm", "-rf", PLANTED, f"{PACKAGES}/step_gates.py", GATES, WATCH, SEEN)


@contextmanager
def configured(grid: Grid, service: str, name: str, text: str) -> Iterator[None]:
    """Add a configuration file to HTCondor on a host."""
    file = f"/etc/condor/config.d/90-test-{name}.conf"
    grid.on(service, "sh", "-c", 'printf "%s\\n" "$1" >"$2" && condor_reconfig', "sh", text, file)
    try:
        yield
    finally:
        grid.on(service, "sh", "-c", f"rm -f {file} && condor_reconfig")


def closed(grid: Grid, node: str) -> AbstractContextManager[None]:
    """Have a node accept no jobs."""
    return configured(grid, node, "closed", "START = False")


def short_leases(grid: Grid) -> AbstractContextManager[None]:
    """Limit the site's job lease to LEASE seconds (40 minutes by default)."""
    names = "JOB_TRANSFORM_NAMES = $(JOB_TRANSFORM_NAMES) TestLease"
    return configured(
        grid, "site", "lease", f"{names}\nJOB_TRANSFORM_TestLease = SET JobLeaseDuration {LEASE}"
    )


def longer_leases(grid: Grid) -> AbstractContextManager[None]:
    """Raise the lease to LONGER_LEASE, over `short_leases`: the last configuration file wins."""
    text = f"JOB_TRANSFORM_TestLease = SET JobLeaseDuration {LONGER_LEASE}"
    return configured(grid, "site", "longer-lease", text)


def left(grid: Grid) -> set[str]:
    """Everything on the node that a job or its VM could have left."""
    return set(grid.on(NODE, "sh", "-c", LEFT).splitlines())


@dataclass
class Volley:
    """Jobs of both kinds; REST jobs come by Condor-C. jobs: how many of each kind."""

    grid: Grid
    desk: Desk
    before: set[str]
    hypervisor: str = "uml"
    jobs: Mapping[str, int] = field(default_factory=lambda: JOBS)
    rest: list[Job] = field(default_factory=list)
    cluster: str = ""
    opened: float = 0.0

    def fire(self) -> None:
        grid = self.grid
        grid.on(NODE, "sh", "-c", f"rm -rf {GATES} {SEEN}; mkdir -m 1777 {GATES}")
        run("docker", "exec", "-d", grid.container(NODE), "python3", WATCH)
        memory = MEMORY[self.hypervisor]
        self.rest = grid.submit(
            REST,
            count=self.jobs["rest"],
            name="every step",
            outputs=["out.txt"],
            memory=memory,
            hypervisor=self.hypervisor,
            boot_seconds=BOOT_SECONDS,
        )
        self.desk.describe(
            UNCHANGED,
            arguments="$(Process)",
            count=self.jobs["unchanged"],
            output="out.$(Process)",
            error="err.$(Process)",
            request_memory=str(memory),
            __VMJobHypervisor=f'"{self.hypervisor}"',
            __VMJobBootTimeout=str(BOOT_SECONDS),
            __VMJobMaxStarts="20",
        )
        self.cluster = self.desk.tool("condor_submit", "-terse", "job.sub").split(".")[0].strip()

    def settle(self) -> None:
        """Wait until a job waits at each step."""
        wait_for(lambda: not self.missing() or None, "a job to stand at each step", SETTLED)

    def missing(self) -> set[str]:
        """Steps at which no job waits."""
        wanted = {f"{kind}.{point}" for kind in KINDS for point in step_gates.points(kind)}
        return wanted - set(self.grid.on(NODE, "ls", GATES).splitlines())

    def open(self) -> None:
        self.opened = time.monotonic()
        self.grid.on(NODE, "touch", f"{GATES}/open")

    # ------------------------------------------------------------------------------ how they ended

    def ended(self) -> list[Job]:
        """Wait until all jobs have ended; return those of the service."""
        wait_for(lambda: not self.queued() or None, "the transparent jobs to leave the queue", LATE)
        return self.grid.wait(*self.rest, timeout=LATE)

    def queued(self) -> list[dict[str, Any]]:
        """Ads of the transparent jobs that have not ended. Fails if one is held."""
        asked = ("-attributes", "ProcId,JobStatus,HoldReason,ChirpVMReason,NumJobStarts", "-json")
        ads: list[dict[str, Any]] = json.loads(self.desk("condor_q", self.cluster, *asked) or "[]")
        held = [ad for ad in ads if ad["JobStatus"] == 5 and "HoldReason" in ad]
        assert not held, held
        return ads

    def assert_ended_well(self) -> None:
        """Assert that each job ended once, as if nothing had happened."""
        for job in self.ended():
            if job.state is not JobState.COMPLETED:
                said = b"".join(self.grid.api.stream(job.id, StreamName.CONSOLE))
                pytest.fail(f"{job.id}: {job.reason}\n{said.decode(errors='replace')[-9000:]}")
            self._assert_whole(job)
        self.assert_unchanged_ended_well()
        self.assert_agreed()

    def assert_unchanged_ended_well(self) -> None:
        """The same, for the transparent jobs only."""
        assert self._assert_unchanged_ended_once() == set(range(self.jobs["unchanged"]))
        names = self.desk("ls", "-A", self.desk.folder).split()
        assert len(names) == len({"data", "job.sh", "job.sub", "log"}) + 3 * self.jobs["unchanged"], (
            names
        )

    def assert_removed(self) -> None:
        """Assert that each job has one end: a complete result if it got that far, else removal."""
        states = {job.state for job in self.ended()}
        assert states <= {JobState.CANCELED, JobState.COMPLETED}, states
        completed = self._assert_unchanged_ended_once()
        there = set(self.desk("ls", "-A", self.desk.folder).split())
        assert {name for name in there if name.startswith("out.txt.")} == {
            f"out.txt.{number}" for number in completed
        }
        self.assert_agreed()

    def _assert_unchanged_ended_once(self) -> set[int]:
        """Assert that the history has each transparent job once: removed, or with complete output.

        Returns the numbers of the completed jobs.
        """
        lines = self._history("ProcId", "JobStatus", "ExitBySignal", "ExitCode").splitlines()
        # A schedd that dies just after it has recorded an end does it again.
        ads = [line.split() for line in sorted(set(lines))]
        ends = {int(number): end for number, *end in ads}
        assert (len(ads), set(ends)) == (len(ends), set(range(self.jobs["unchanged"]))), ads
        told, completed = self.desk.read("log"), set()
        for number, end in ends.items():
            job = f"{int(self.cluster):03d}.{number:03d}."
            said = [told.count(f"{event} ({job}") for event in ("005", "009")]
            if end[0] == REMOVED:
                assert said == [0, 1], told
                continue
            assert (end, said) == ([COMPLETED, "false", "0"], [1, 0]), (ads, told)
            assert self.desk.read(f"out.{number}") == "begun\ndone\n"
            assert self.desk.read(f"out.txt.{number}") == "result\n"
            completed.add(number)
        return completed

    def _assert_whole(self, job: Job) -> None:
        """Assert that the job's output is complete and there once."""
        assert self.grid.out(job) == "begun\ndone\n"
        assert [o.path for o in job.outputs] == ["out.txt"]
        assert [o.size for o in job.outputs] == [len("result\n")]

    def _history(self, *names: str) -> str:
        # Asked for a cluster by number, condor_history stops at the first job that ended before the
        # cluster was submitted: too early where Condor-C jobs stay in the queue for a while.
        return self.desk("condor_history", "-constraint", f"ClusterId == {self.cluster}", "-af", *names)

    def assert_agreed(self) -> None:
        """Assert that each job of the service has one end, and that HTCondor has the same one."""
        for job in self.rest:
            events = self.grid.api.events(job.id)
            ends = [event.state for event in events if event.state.final]
            assert len(ends) == 1, events
            (state,) = ends
            wait_for(
                partial(self._left_queue, job),
                "the queue",
                60,
            )
            found = self._at_schedd("condor_history", job, "JobStatus", "ExitCode")
            if not found:
                at_schedd = self.grid.api.job(job.id).condor
                assert (state, at_schedd) == (JobState.CANCELED, None), "HTCondor never had it"
                continue
            # A schedd that died may have recorded the end twice.
            ((status, exit),) = set(zip(found[::2], found[1::2], strict=True))
            assert (status == REMOVED) == (state is JobState.CANCELED), (job.id, state, found)
            # The exit code of a removed job's process, if HTCondor learned it, is not the job's end.
            if status != REMOVED:
                assert exit != "undefined", (job.id, state, found)
                assert (exit == "0") == (state is JobState.COMPLETED), (job.id, state, found)

    def _left_queue(self, job: Job) -> bool:
        return not self._at_schedd("condor_q", job, "JobStatus")

    def _at_schedd(self, tool: str, job: Job, *names: str) -> list[str]:
        wanted = f'VMJobsId == "{job.id}"'
        everyone = () if tool == "condor_history" else ("-allusers",)
        return self.grid.on("submit", tool, *everyone, "-constraint", wanted, "-af", *names).split()

    def seconds(self) -> int:
        """Seconds since the jobs continued."""
        return round(time.monotonic() - self.opened)

    def starts(self) -> int:
        begun = self._history("NumJobStarts").split()
        return sum(map(int, begun)) + sum(self.grid.api.job(job.id).attempts for job in self.rest)

    def leases(self) -> set[int]:
        """Job leases at the site, in seconds."""
        asked = ("-allusers", "-constraint", "JobStatus == 2", "-af", "JobLeaseDuration")
        return set(map(int, self.grid.on("site", "condor_q", *asked).split()))

    def assert_found_again(self) -> None:
        """Assert that all jobs lost their shadows, and that none was started twice.

        It reads HTCondor's job log and the service's records: a shadow's own counts may die with it.
        """
        told, unchanged = self.desk.read("log"), self.jobs["unchanged"]
        assert told.count("\n023 (") >= unchanged, "not all had a shadow that was killed"
        assert told.count("\n001 (") == unchanged, told
        attempts = [self.grid.api.job(job.id).attempts for job in self.rest]
        assert attempts == [1] * len(self.rest), attempts

    # ------------------------------------------------------------------------------ what is left

    def assert_nothing_left(self) -> None:
        """Assert that within two heartbeats nothing of the jobs is left on the node."""
        more: set[str] = set()

        def gone() -> bool:
            more.clear()
            more.update(left(self.grid) - self.before)
            return not more

        with suppress(AssertionError):
            wait_for(gone, "nothing to be left", CLEAN)
        assert not more

    def assert_never_twice(self, least: int) -> None:
        """Assert that no job had two VMs at once. least: how many VMs must have run at once."""
        self.grid.on(NODE, "pkill", "-f", WATCH)
        told = self.grid.on(NODE, "grep", "-oE", r"condor\.[0-9]+ is job [0-9.]+ of", LOG)
        jobs = dict(re.findall(r"(condor\.\d+) is job ([\d.]+)", told))
        most = 0
        for line in self.grid.on(NODE, "cat", SEEN).splitlines():
            moment, living = json.loads(line)
            names = [name.split()[0] for name in living]
            running = [jobs.get(name, name) for name in names]
            assert len(running) == len(set(running)), (moment, living)
            assert not [name for name in living if name.startswith("of no run")], (moment, living)
            most = max(most, len(running))
        assert most >= least, "whatever looked for machines saw too few of them"


@contextmanager
def stage(grid: Grid) -> Iterator[None]:
    """Have only one node run jobs: as many as there are steps, each of which stops at one."""
    jobs = sum(JOBS.values())
    with ExitStack() as stack:
        stack.enter_context(planted(grid))
        stack.enter_context(room(grid, NODE, jobs, jobs * (max(MEMORY.values()) + 32)))
        stack.enter_context(short_leases(grid))
        for other in set(NODES) - {NODE}:
            stack.enter_context(closed(grid, other))
        yield


@contextmanager
def fired(
    grid: Grid, hypervisor: str = "uml", jobs: Mapping[str, int] = MappingProxyType(JOBS)
) -> Iterator[Volley]:
    """Submit jobs, one for each step by default; remove all traces of them afterwards."""
    volley = Volley(grid, Desk(grid, "site"), left(grid), hypervisor, jobs)
    try:
        volley.fire()
        yield volley
    finally:
        volley.open()
        volley.desk("condor_rm", volley.cluster or "0", check=False)
        for job in volley.rest:
            with suppress(Conflict):
                grid.api.cancel(job.id)
        volley.desk("rm", "-rf", volley.desk.folder)


@pytest.fixture(scope="module")
def node(grid: Grid) -> Iterator[None]:
    """Make `NODE` the only node that runs jobs."""
    with stage(grid):
        yield


@pytest.fixture
def volley(grid: Grid, node: None) -> Iterator[Volley]:
    with fired(grid) as there:
        there.settle()
        yield there


@contextmanager
def removed(volley: Volley) -> Iterator[None]:
    """Remove and cancel all jobs."""
    volley.desk("condor_rm", volley.cluster, check=not volley.opened)
    for job in volley.rest:
        with suppress(Conflict):  # a job may have reported its end
            volley.grid.api.cancel(job.id)
    yield


def assert_clean(volley: Volley, least: int = 2) -> None:
    """Assert that nothing is left of the jobs. least: how many VMs must have run at once."""
    volley.assert_nothing_left()
    volley.assert_never_twice(least)


def at_origin(volley: Volley, tool: str, *, check: bool = True) -> None:
    """Have a tool of HTCondor's act on the jobs of the service, at their origin."""
    for job in volley.rest:
        volley.grid.on("submit", tool, "-constraint", f'VMJobsId == "{job.id}"', check=check)
