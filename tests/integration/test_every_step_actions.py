"""Actions of users and sites at every step of a run, as test_every_step.py has it for faults."""

from __future__ import annotations

import re
import time

import pytest

from tests.kit.grid import wait_for
from tests.kit.steps import (
    JOBS,
    NODE,
    SETTLED,
    Volley,
    assert_clean,
    at_origin,
    configured,
    node,
    removed,
    volley,
)
from vmjobs.agent.run.steps import STEPS
from vmjobs.model import JobState

__all__ = ["node", "volley"]

pytestmark = pytest.mark.disruptive


@pytest.mark.soak
def test_they_are_suspended(volley: Volley) -> None:
    """Suspend all jobs of the site, of both kinds; every VM is paused in the end."""
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
        still = wait_for(lambda: _at_rest(volley) or None, "all VMs to stand still", SETTLED)
        # Jobs that had begun to boot or to run have VMs, too, so there are more.
        assert len(still) >= len([step for step in STEPS if step.phase == "staging"]), still
    finally:
        volley.open()
        volley.grid.on("site", "condor_continue", "-all")
    volley.assert_ended_well()
    assert_clean(volley)


#: `ps` lines (state and arguments) of a VM's first process, and of a stopped guest kernel.
FIRST = re.compile(r"vmjobs-sandbox .*umid=(vmjobs-\S+)")
STOPPED = re.compile(r"T\S* +\S*linux\.uml .*umid=(vmjobs-\S+)")


def _standing(volley: Volley) -> set[str]:
    """The VMs, if the node's kernel has stopped all of them; else none."""
    listed = volley.grid.on(NODE, "ps", "-ww", "-eo", "stat,args").splitlines()
    there = {found[1] for line in listed if (found := FIRST.search(line))}
    stopped = {found[1] for line in listed if (found := STOPPED.match(line))}
    return there if there == stopped else set()


def _at_rest(volley: Volley) -> set[str]:
    """The same, if nothing changes for five seconds, in which other VMs would have come up."""
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
    # These jobs do not even have a VM.
    assert ends.count(JobState.CANCELED) >= len([step for step in STEPS if step.phase == "staging"])
    assert_clean(volley)


@pytest.mark.soak
def test_they_are_held_and_released(volley: Volley) -> None:
    volley.desk("condor_hold", volley.cluster)
    at_origin(volley, "condor_hold")
    volley.open()
    volley.assert_nothing_left()
    volley.desk("condor_release", volley.cluster)
    at_origin(volley, "condor_release")
    volley.assert_ended_well()
    assert_clean(volley)


@pytest.mark.soak
@pytest.mark.parametrize("options", [(), ("-fast",)], ids=["in time", "at once"])
def test_they_are_vacated(volley: Volley, options: tuple[str, ...]) -> None:
    volley.grid.on("site", "condor_vacate_job", *options, "-all")
    volley.open()
    volley.assert_ended_well()
    assert volley.starts() > sum(JOBS.values()), "no job had to leave"
    assert_clean(volley)


@pytest.mark.soak
def test_the_node_prefers_to_be_without_them(volley: Volley) -> None:
    """PREEMPT, which the node's owner sets, evicts all jobs that run there for the first time."""
    text = "PREEMPT = TARGET.NumJobStarts < 1\nMAXJOBRETIREMENTTIME = 0"
    told = ("condor_status", "-constraint", f'Machine == "{NODE}.grid" && State == "Preempting"')
    with configured(volley.grid, NODE, "preempt", text):
        wait_for(lambda: volley.grid.on("site", *told, "-af", "Name") or None, "jobs to be told", 60)
        volley.open()
        volley.assert_ended_well()
    assert volley.starts() > sum(JOBS.values()), "no job had to leave"
    assert_clean(volley)
