"""Faults at every step of a run: each job ends once, and leaves nothing behind.

Each test has jobs of both kinds wait at all steps at once, injects one fault, and lets them continue.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from operator import gt

import pytest

from tests.kit.faults import AGENT, Tell, cut_off, fill, lost, small_disk
from tests.kit.grid import Grid, wait_for
from tests.kit.steps import (
    FEW,
    JOBS,
    LONGER_LEASE,
    NODE,
    Volley,
    assert_clean,
    at_origin,
    fired,
    longer_leases,
    node,
    removed,
    volley,
)
from tests.kit.submit_host import LOG
from vmjobs.model import JobState, ReasonCode

__all__ = ["node", "volley"]

pytestmark = pytest.mark.disruptive

Fault = Callable[[Volley], AbstractContextManager[None]]


# --------------------------------------------------------------------------- faults


@contextmanager
def killed(volley: Volley, *which: tuple[str, str]) -> Iterator[None]:
    """kill -9 all matching processes of hosts; their supervisors restart them."""
    for service, pattern in which:  # once the jobs continue there may be no such process
        volley.grid.on(service, "pkill", "-KILL", "-f", pattern, check=not volley.opened)
    yield


@contextmanager
def schedd_killed(volley: Volley, service: str, pattern: str = "^condor_schedd") -> Iterator[None]:
    """Kill a schedd and wait until it answers again. pattern: also matches what dies with it."""
    with killed(volley, (service, pattern)):
        yield
        answer = partial(volley.grid.on, service, "condor_q", "-allusers", "-totals", check=False)
        wait_for(lambda: "Total" in answer() or None, f"the schedd of {service}", 60)


def killing(*which: tuple[str, str]) -> Fault:
    return lambda volley: killed(volley, *which)


#: Matches the first process of each VM, which ends all others: killed one by one, some kernel would see
#: its guest's init die first, and panic.
MACHINES = (NODE, "vmjobs-sandbox.*umid=vmjobs-|guest=vmjobs-")
LIBVIRTD = "libvirt's daemon"
FAULTS: dict[str, Fault] = {
    "the agent": killing((NODE, "vmjobs agent")),
    "what waits for the machines": killing((NODE, "vmjobs exec")),
    "the starters": killing((NODE, "^condor_starter")),
    "the startd": killing((NODE, "^condor_startd")),
    "the shadows": killing(("site", "^condor_shadow")),
    "the site's schedd": lambda volley: schedd_killed(volley, "site"),
    "the origin's schedd": lambda volley: schedd_killed(volley, "submit"),
    "the API": killing(("api", "vmjobs serve")),
    "the worker": killing(("worker", "vmjobs worker")),
    "the database": lambda volley: lost(volley.grid, "postgres"),
    "the broker": lambda volley: lost(volley.grid, "rabbitmq"),
    "the node's network": lambda volley: cut_off(volley.grid, NODE),
    "the site's network": lambda volley: cut_off(volley.grid, "site"),
    "the origin's network": lambda volley: cut_off(volley.grid, "submit"),
    LIBVIRTD: killing((NODE, "bin/libvirtd")),
}


#: Related faults are injected together, as each volley takes a minute; a soak injects each alone, too.
TOGETHER = {
    "the agent": ("the agent",),
    "what waits for the machines": ("what waits for the machines",),
    "all of HTCondor": (
        "the starters",
        "the startd",
        "the shadows",
        "the site's schedd",
        "the origin's schedd",
    ),
    "the whole service": ("the API", "the worker", "the database", "the broker"),
    "the node's network": ("the node's network",),
    LIBVIRTD: (LIBVIRTD,),
}
#: All others run only in the soak.
IN_EVERY_RUN = {"the agent", "all of HTCondor"}
#: Faults that no job notices.
UNNOTICED = {"the origin's schedd", "the API", "the worker", "the database", "the broker", LIBVIRTD}
#: The hypervisor of the VMs, where it is not User-mode Linux.
HYPERVISOR = {LIBVIRTD: "qemu"}


@pytest.mark.soak_for(*TOGETHER.keys() - IN_EVERY_RUN)
@pytest.mark.parametrize("what", TOGETHER)
def test_it_dies(grid: Grid, node: None, what: str, record_property: Tell) -> None:
    with fired(grid, HYPERVISOR.get(what, "uml")) as volley:
        volley.settle()
        _assert_survived(volley, TOGETHER[what], record_property)


@pytest.mark.soak
@pytest.mark.parametrize("what", [name for name in FAULTS if name not in TOGETHER])
def test_it_dies_alone(volley: Volley, what: str, record_property: Tell) -> None:
    _assert_survived(volley, (what,), record_property)


@pytest.mark.soak
@pytest.mark.parametrize("what", ["the agent", "what waits for the machines", "the starters"])
def test_it_dies_under_vms_of_qemus(grid: Grid, node: None, what: str, record_property: Tell) -> None:
    with fired(grid, "qemu") as volley:
        volley.settle()
        _assert_survived(volley, (what,), record_property)


def _assert_survived(volley: Volley, faults: Collection[str], record_property: Tell) -> None:
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(FAULTS[fault](volley))
        volley.open()
    volley.assert_ended_well()
    assert_clean(volley)
    starts = volley.starts()
    record_property("job", (volley.seconds(), starts))
    assert not UNNOTICED.issuperset(faults) or starts == sum(JOBS.values()), "one was begun twice"


@pytest.mark.soak
def test_the_sites_schedd_dies_with_its_shadows(grid: Grid, node: None, record_property: Tell) -> None:
    """As when the site's host fails, new shadows reconnect to the jobs at every step.

    As there is a job at each step, this includes jobs that stage, boot or collect. The schedd is back
    in about ten seconds, which must be before the leases end.
    """
    with longer_leases(grid), fired(grid) as volley:
        volley.settle()
        assert volley.leases() == {LONGER_LEASE}
        with schedd_killed(volley, "site", "^condor_schedd|^condor_shadow"):
            volley.open()
        volley.assert_ended_well()
        volley.assert_found_again()
        assert_clean(volley)
        record_property("job", (volley.seconds(), volley.starts()))


def test_the_vms_die(volley: Volley) -> None:
    """A transparent job starts again; a job of the service reports what happened to it."""
    with killed(volley, MACHINES):
        volley.open()
    _assert_lost_or_well(volley)
    assert {job.state for job in volley.ended()} == {JobState.COMPLETED, JobState.FAILED}
    assert_clean(volley)


def _assert_lost_or_well(volley: Volley) -> None:
    lost = [job for job in volley.ended() if job.state is not JobState.COMPLETED]
    assert {job.reason.code for job in lost} <= {ReasonCode.GUEST_LOST, ReasonCode.BOOT_FAILED}
    volley.assert_unchanged_ended_well()
    volley.assert_agreed()


#: Directories that the agent writes, and KiB of disks with space for all jobs. RUNS holds the data of
#: VMs, HANDED the input and output of transparent jobs, none of which starts with less free space than
#: it may write, which is a GiB.
RUNS, HANDED = f"{AGENT}/runs", f"{AGENT}/handed"
RUNS_KIB, HANDED_KIB = 2 * 1024 * 1024, 1100 * 1024


@contextmanager
def small_disks(grid: Grid) -> Iterator[None]:
    """Put both directories on small disks of their own."""
    with small_disk(grid, NODE, "runs", RUNS_KIB), small_disk(grid, NODE, "handed", HANDED_KIB):
        yield


@pytest.mark.soak
def test_the_disk_is_full(grid: Grid, node: None) -> None:
    """Jobs of both kinds start again, though no other node accepts them."""
    with small_disks(grid), fired(grid) as volley:
        volley.settle()
        before = _found_full(grid)
        fillers = [fill(grid, NODE, place) for place in (RUNS, HANDED)]
        volley.open()
        wait_for(lambda: all(map(gt, _found_full(grid), before)), "jobs to find both disks full", 120)
        grid.on(NODE, "rm", *fillers)
        volley.assert_ended_well()
        assert_clean(volley)


def _found_full(grid: Grid) -> tuple[int, int]:
    """Count "no space" lines in the agent's log: for transparent jobs' files, and others."""
    words = ("-e", "No space left", "-e", " MiB, and this node has ")
    told = grid.on(NODE, "grep", "-F", *words, LOG, check=False).splitlines()
    brought = sum("room for the job's files" in line or "the job's disk needs" in line for line in told)
    return brought, len(told) - brought


# --------------------------------------------------------------------------- at random moments


#: Seconds that a temporary fault lasts at a random moment; the test waits for nothing then.
LASTS = 5


@contextmanager
def vacated(volley: Volley, *how: str) -> Iterator[None]:
    volley.grid.on("site", "condor_vacate_job", *how, "-all", check=False)
    yield


@contextmanager
def for_a_while(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    begin()
    try:
        yield
        time.sleep(LASTS)
    finally:
        end()


def held(volley: Volley) -> AbstractContextManager[None]:
    """Hold all jobs at their origin for a while."""

    def run(tool: str) -> None:
        volley.desk(tool, volley.cluster, check=False)
        at_origin(volley, tool, check=False)

    return for_a_while(partial(run, "condor_hold"), partial(run, "condor_release"))


def suspended(volley: Volley) -> AbstractContextManager[None]:
    """Suspend all jobs of the site for a while."""
    run = partial(volley.grid.on, "site", check=False)
    return for_a_while(lambda: run("condor_suspend", "-all"), lambda: run("condor_continue", "-all"))


def drained(volley: Volley) -> AbstractContextManager[None]:
    """Drain the node for a while: it evicts its jobs and accepts none."""
    run, node = partial(volley.grid.on, "site", "condor_drain"), f"{NODE}.grid"
    return for_a_while(lambda: run("-fast", node), lambda: run("-cancel", node))


def filled(volley: Volley) -> AbstractContextManager[None]:
    """Fill the agent's (small) disks for a while."""
    fillers: list[str] = []
    return for_a_while(
        lambda: fillers.extend(fill(volley.grid, NODE, place) for place in (RUNS, HANDED)),
        lambda: volley.grid.on(NODE, "rm", *fillers),
    )


MACHINES_DIE, REMOVED, FULL = "the machines", "all are removed", "the disk is full"
#: Events at random moments: faults, and actions of users and sites.
EVENTS: dict[str, Fault] = {
    **FAULTS,
    MACHINES_DIE: killing(MACHINES),
    FULL: filled,
    REMOVED: removed,
    "all are vacated": vacated,
    "all are vacated at once": lambda volley: vacated(volley, "-fast"),
    "all are suspended": suspended,
    "all are held": held,
    "the node is drained": drained,
}
#: Assertions for events after which not all jobs end well.
ENDS: dict[str, Callable[[Volley], None]] = {
    MACHINES_DIE: _assert_lost_or_well,
    REMOVED: Volley.assert_removed,
}
#: Differs in each soak; the report records it.
SEED = os.environ.get("VMJOBS_SOAK_SEED") or str(int(time.time()))
TURNS = int(os.environ.get("VMJOBS_SOAK_TURNS", str(len(EVENTS))))


def event_of(turn: int) -> str:
    """Pick an event in an order that the seed decides; none repeats before all have occurred."""
    round_, place = divmod(turn, len(EVENTS))
    return random.Random(f"{SEED} round {round_}").sample(sorted(EVENTS), len(EVENTS))[place]


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(TURNS))
def test_at_any_moment(grid: Grid, node: None, turn: int, record_property: Tell) -> None:
    """Jobs stop at no step, and an event occurs at a random moment."""
    chance = random.Random(f"{SEED} {turn}")
    what, moment = event_of(turn), chance.uniform(0, 30)
    hypervisor = HYPERVISOR.get(what) or chance.choice(("uml", "uml", "qemu"))
    note = f"{what}, {moment:.1f} s after the submission, {hypervisor}; VMJOBS_SOAK_SEED={SEED}"
    record_property("note", note)
    with ExitStack() as stack:
        if what == FULL:
            stack.enter_context(small_disks(grid))
        jobs = FEW if hypervisor == "qemu" else JOBS
        volley = stack.enter_context(fired(grid, hypervisor, jobs))
        volley.open()
        time.sleep(moment)
        with EVENTS[what](volley):
            pass
        ENDS.get(what, Volley.assert_ended_well)(volley)
        assert_clean(volley, least=0 if what == REMOVED else 2)  # a removal may precede all VMs
        record_property("job", (volley.seconds(), volley.starts()))
