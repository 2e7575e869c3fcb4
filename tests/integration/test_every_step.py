"""Whatever dies, at whatever step of a run: each job comes to one end, and nothing of it is left.

Each test has jobs of both kinds stand at all steps at once, breaks one thing, and lets them go on.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from operator import gt

import pytest
from faults_kit import AGENT, Tell, cut_off, fill, lost, small_disk
from grid_kit import Grid, wait_for
from steps_kit import (
    FEW,
    JOBS,
    LONGER_LEASE,
    NODE,
    SETTLED,
    Volley,
    configured,
    fired,
    longer_leases,
    stage,
)
from transparent_kit import LOG

from vmjobs.agent.run.steps import STEPS
from vmjobs.errors import Conflict
from vmjobs.model import JobState, ReasonCode

pytestmark = pytest.mark.disruptive

Fault = Callable[[Volley], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def node(grid: Grid) -> Iterator[None]:
    """The only node that runs jobs."""
    with stage(grid):
        yield


@pytest.fixture
def volley(grid: Grid, node: None) -> Iterator[Volley]:
    """Jobs that stand at all steps."""
    with fired(grid) as there:
        there.settle()
        yield there


# --------------------------------------------------------------------------- what dies


@contextmanager
def killed(volley: Volley, *which: tuple[str, str]) -> Iterator[None]:
    """kill -9 of all processes of hosts that match; what looks after them starts them again."""
    for service, pattern in which:  # of jobs that go on there may be none
        volley.grid.on(service, "pkill", "-KILL", "-f", pattern, check=not volley.opened)
    yield


@contextmanager
def schedd_killed(volley: Volley, service: str, pattern: str = "^condor_schedd") -> Iterator[None]:
    """The same of a schedd, until it answers again. pattern: it, and what dies with it."""
    with killed(volley, (service, pattern)):
        yield
        answer = partial(volley.grid.on, service, "condor_q", "-allusers", "-totals", check=False)
        wait_for(lambda: "Total" in answer() or None, f"the schedd of {service}", 60)


def killing(*which: tuple[str, str]) -> Fault:
    return lambda volley: killed(volley, *which)


#: The first process of each, which takes all others along: killed one by one, some kernel sees its
#: guest's init die before itself, and panics.
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


#: What stands beside each other dies together, as each volley takes a minute; in a soak by itself, too.
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
#: The others are for the soak.
IN_EVERY_RUN = {"the agent", "all of HTCondor"}
#: What dies without any job noticing.
UNNOTICED = {"the origin's schedd", "the API", "the worker", "the database", "the broker", LIBVIRTD}
#: Of machines that are not User Mode Linux.
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
def test_it_dies_under_machines_of_qemus(
    grid: Grid, node: None, what: str, record_property: Tell
) -> None:
    with fired(grid, "qemu") as volley:
        volley.settle()
        _assert_survived(volley, (what,), record_property)


def _assert_survived(volley: Volley, faults: Collection[str], record_property: Tell) -> None:
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(FAULTS[fault](volley))
        volley.open()
    volley.assert_ended_well()
    _assert_clean(volley)
    starts = volley.starts()
    record_property("job", (volley.seconds(), starts))
    assert not UNNOTICED.issuperset(faults) or starts == sum(JOBS.values()), "one was begun twice"


@pytest.mark.soak
def test_the_sites_schedd_dies_with_its_shadows(grid: Grid, node: None, record_property: Tell) -> None:
    """As when its host dies. New shadows find the jobs again: as there is one at each step, those that
    stage, boot or collect, too. It is back in about ten seconds, and has to be before their leases end.
    """
    with longer_leases(grid), fired(grid) as volley:
        volley.settle()
        assert volley.leases() == {LONGER_LEASE}
        with schedd_killed(volley, "site", "^condor_schedd|^condor_shadow"):
            volley.open()
        volley.assert_ended_well()
        volley.assert_found_again()
        _assert_clean(volley)
        record_property("job", (volley.seconds(), volley.starts()))


def test_the_machines_die(volley: Volley) -> None:
    """An unchanged job is begun again. One of the service says what happened to it."""
    with killed(volley, MACHINES):
        volley.open()
    _assert_lost_or_well(volley)
    assert {job.state for job in volley.ended()} == {JobState.COMPLETED, JobState.FAILED}
    _assert_clean(volley)


def _assert_lost_or_well(volley: Volley) -> None:
    lost = [job for job in volley.ended() if job.state is not JobState.COMPLETED]
    assert {job.reason.code for job in lost} <= {ReasonCode.GUEST_LOST, ReasonCode.BOOT_FAILED}
    volley.assert_unchanged_ended_well()
    volley.assert_agreed()


#: Where an agent writes, and KiB of disks that have room for all jobs: in the one place is what their
#: machines need, in the other what HTCondor's jobs bring and take away. Of these none is begun where
#: less is free than it may write, which is a GiB.
RUNS, HANDED = f"{AGENT}/runs", f"{AGENT}/handed"
RUNS_KIB, HANDED_KIB = 2 * 1024 * 1024, 1100 * 1024


@contextmanager
def small_disks(grid: Grid) -> Iterator[None]:
    """Have both on small disks of their own."""
    with small_disk(grid, NODE, "runs", RUNS_KIB), small_disk(grid, NODE, "handed", HANDED_KIB):
        yield


@pytest.mark.soak
def test_the_disk_is_full(grid: Grid, node: None) -> None:
    """Jobs of both kinds are begun again, though they have nowhere else to go."""
    with small_disks(grid), fired(grid) as volley:
        volley.settle()
        before = _found_full(grid)
        fillers = [fill(grid, NODE, place) for place in (RUNS, HANDED)]
        volley.open()
        wait_for(lambda: all(map(gt, _found_full(grid), before)), "jobs to find both disks full", 120)
        grid.on(NODE, "rm", *fillers)
        volley.assert_ended_well()
        _assert_clean(volley)


def _found_full(grid: Grid) -> tuple[int, int]:
    """How often the agent had no room for what a job brings, and had none anywhere else."""
    words = ("-e", "No space left", "-e", " MiB, and this node has ")
    told = grid.on(NODE, "grep", "-F", *words, LOG, check=False).splitlines()
    brought = sum("room for the job's files" in line or "the job's disk needs" in line for line in told)
    return brought, len(told) - brought


# --------------------------------------------------------------------------- what users and sites do


@pytest.mark.soak
def test_they_are_suspended(volley: Volley) -> None:
    """All jobs of the site, however they came. Whatever machine there is stands still in the end."""
    volley.grid.on("site", "condor_suspend", "-all")
    asked = ("condor_q", "-allusers", "-constraint", "JobStatus == 7", "-af", "ClusterId")
    everyone = sum(JOBS.values())
    try:
        wait_for(
            lambda: len(volley.grid.on("site", *asked).split()) >= everyone or None,
            "all to be suspended",
            60,
        )
        volley.open()
        still = wait_for(lambda: _at_rest(volley) or None, "all machines to stand still", SETTLED)
        # There are more: of those as well that had begun to boot, or to run.
        assert len(still) >= len([step for step in STEPS if step.phase == "staging"]), still
    finally:
        volley.open()
        volley.grid.on("site", "condor_continue", "-all")
    volley.assert_ended_well()
    _assert_clean(volley)


#: A machine's first process, and a guest's kernel that is stopped, as `ps` has them: state and words.
FIRST = re.compile(r"vmjobs-sandbox .*umid=(vmjobs-\S+)")
STOPPED = re.compile(r"T\S* +\S*linux\.uml .*umid=(vmjobs-\S+)")


def _standing(volley: Volley) -> set[str]:
    """The machines, if the node's own kernel has stopped all of them."""
    listed = volley.grid.on(NODE, "ps", "-ww", "-eo", "stat,args").splitlines()
    there = {found[1] for line in listed if (found := FIRST.search(line))}
    stopped = {found[1] for line in listed if (found := STOPPED.match(line))}
    return there if there == stopped else set()


def _at_rest(volley: Volley) -> set[str]:
    """The same, if nothing has changed for a while: others would have come up by then."""
    before = _standing(volley)
    if before:
        time.sleep(5)
    return before if _standing(volley) == before else set()


@pytest.mark.soak
def test_they_are_removed(volley: Volley) -> None:
    with removed(volley):
        volley.open()
    volley.assert_removed()
    ends = [job.state for job in volley.ended()]
    # These have not even a machine.
    assert ends.count(JobState.CANCELED) >= len([step for step in STEPS if step.phase == "staging"])
    _assert_clean(volley)


@contextmanager
def removed(volley: Volley) -> Iterator[None]:
    """Nobody wants the jobs any more."""
    volley.desk("condor_rm", volley.cluster, check=not volley.opened)
    for job in volley.rest:
        with suppress(Conflict):  # one has told its end
            volley.grid.api.cancel(job.id)
    yield


@pytest.mark.soak
def test_they_are_held_and_released(volley: Volley) -> None:
    volley.desk("condor_hold", volley.cluster)
    _at_origin(volley, "condor_hold")
    volley.open()
    volley.assert_nothing_left()
    volley.desk("condor_release", volley.cluster)
    _at_origin(volley, "condor_release")
    volley.assert_ended_well()
    _assert_clean(volley)


@pytest.mark.soak
def test_they_are_vacated(volley: Volley) -> None:
    volley.grid.on("site", "condor_vacate_job", "-all")
    volley.open()
    volley.assert_ended_well()
    assert volley.starts() > sum(JOBS.values()), "nobody had to leave"
    _assert_clean(volley)


@pytest.mark.soak
def test_they_are_vacated_at_once(volley: Volley) -> None:
    volley.grid.on("site", "condor_vacate_job", "-fast", "-all")
    volley.open()
    volley.assert_ended_well()
    assert volley.starts() > sum(JOBS.values()), "nobody had to leave"
    _assert_clean(volley)


@pytest.mark.soak
def test_the_node_prefers_to_be_without_them(volley: Volley) -> None:
    """Preemption: by what its owner has set, for all that run there for the first time."""
    text = "PREEMPT = TARGET.NumJobStarts < 1\nMAXJOBRETIREMENTTIME = 0"
    told = ("condor_status", "-constraint", f'Machine == "{NODE}.grid" && State == "Preempting"')
    with configured(volley.grid, NODE, "preempt", text):
        wait_for(lambda: volley.grid.on("site", *told, "-af", "Name") or None, "jobs to be told", 60)
        volley.open()
        volley.assert_ended_well()
    assert volley.starts() > sum(JOBS.values()), "nobody had to leave"
    _assert_clean(volley)


def _assert_clean(volley: Volley, least: int = 2) -> None:
    """Nothing is left of them. least: machines that there were at once."""
    volley.assert_nothing_left()
    volley.assert_never_twice(least)


def _at_origin(volley: Volley, tool: str, *, check: bool = True) -> None:
    for job in volley.rest:
        volley.grid.on("submit", tool, "-constraint", f'VMJobsId == "{job.id}"', check=check)


# --------------------------------------------------------------------------- at any moment


#: Seconds that what passes lasts, at random moments: nobody waits for anything then.
LASTS = 5


@contextmanager
def vacated(volley: Volley, *how: str) -> Iterator[None]:
    """All jobs of the site have to leave their nodes."""
    volley.grid.on("site", "condor_vacate_job", *how, "-all", check=False)
    yield


@contextmanager
def held(volley: Volley) -> Iterator[None]:
    """All jobs are held where they came from, for a while."""
    volley.desk("condor_hold", volley.cluster, check=False)
    _at_origin(volley, "condor_hold", check=False)
    try:
        yield
        time.sleep(LASTS)
    finally:
        volley.desk("condor_release", volley.cluster, check=False)
        _at_origin(volley, "condor_release", check=False)


@contextmanager
def suspended(volley: Volley) -> Iterator[None]:
    """All jobs of the site stand still for a while."""
    volley.grid.on("site", "condor_suspend", "-all", check=False)
    try:
        yield
        time.sleep(LASTS)
    finally:
        volley.grid.on("site", "condor_continue", "-all", check=False)


@contextmanager
def drained(volley: Volley) -> Iterator[None]:
    """The node takes no jobs for a while, and has those that it has leave."""
    volley.grid.on("site", "condor_drain", "-fast", f"{NODE}.grid")
    try:
        yield
        time.sleep(LASTS)
    finally:
        volley.grid.on("site", "condor_drain", "-cancel", f"{NODE}.grid")


@contextmanager
def filled(volley: Volley) -> Iterator[None]:
    """The agent's disks, small ones, are full for a while."""
    fillers = [fill(volley.grid, NODE, place) for place in (RUNS, HANDED)]
    try:
        yield
        time.sleep(LASTS)
    finally:
        volley.grid.on(NODE, "rm", *fillers)


MACHINES_DIE, REMOVED, FULL = "the machines", "all are removed", "the disk is full"
#: What happens at any moment: what dies, and what users and sites do.
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
#: What has to be so afterwards, where that is not a good end of all.
ENDS: dict[str, Callable[[Volley], None]] = {
    MACHINES_DIE: _assert_lost_or_well,
    REMOVED: Volley.assert_removed,
}
#: Another one each time, which the report has.
SEED = os.environ.get("VMJOBS_SOAK_SEED") or str(int(time.time()))
TURNS = int(os.environ.get("VMJOBS_SOAK_TURNS", str(len(EVENTS))))


def event_of(turn: int) -> str:
    """Each of them before any comes again, in an order that the seed decides."""
    round_, place = divmod(turn, len(EVENTS))
    return random.Random(f"{SEED} round {round_}").sample(sorted(EVENTS), len(EVENTS))[place]


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(TURNS))
def test_at_any_moment(grid: Grid, node: None, turn: int, record_property: Tell) -> None:
    """Jobs that stop nowhere, and something that happens whenever it does."""
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
        _assert_clean(volley, least=0 if what == REMOVED else 2)  # they may be before they have any
        record_property("job", (volley.seconds(), volley.starts()))
