"""Outcomes of transparent jobs: the table, the schedd's policy and the documentation."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import classad2
import pytest

from condor import names
from condor.events import outcomes
from condor.node.chirp import VALUE_MAX, ClassAdExpression
from tests.kit import ROOT
from tests.kit.reports import ended
from vmjobs.errors import NotFound
from vmjobs.model import ExitStatus, ReasonCode
from vmjobs.transparent_job import RunResult

if TYPE_CHECKING:
    from condor.node.chirp import AttributeValue

NOW = 1795228200.7
#: Reason codes that are not ends of a VM, or are states of the service's own jobs.
ELSEWHERE = {
    ReasonCode.SUBMITTED,
    ReasonCode.SCHEDULED,
    ReasonCode.PROGRESS,
    ReasonCode.INPUT_UNAVAILABLE,  # a transparent job brings its input
    ReasonCode.SUCCEEDED,
    ReasonCode.AGENT_RESTARTED,
    ReasonCode.SCHEDULER_UNAVAILABLE,
    ReasonCode.SCHEDULER_HELD,
    ReasonCode.USER_HELD,
    ReasonCode.SCHEDULER_REMOVED,
    ReasonCode.SCHEDULER_LOST,
    ReasonCode.RELEASED,
    ReasonCode.EVICTED,
    ReasonCode.CHECKPOINTED,
    ReasonCode.NOT_RESUMED,
    ReasonCode.USER_CANCELED,
    ReasonCode.USER_HELD,
}


@pytest.mark.parametrize("code", sorted(set(ReasonCode) - ELSEWHERE))
def test_every_failure_of_a_run_has_an_outcome(code: ReasonCode) -> None:
    assert code.value in outcomes.OUTCOMES


def test_sub_codes_differ() -> None:
    found = [outcome.subcode for outcome in outcomes.OUTCOMES.values()]
    assert len(set(found)) == len(found)
    assert outcomes.outcome_of("WHAT_NOBODY_THOUGHT_OF").action == outcomes.AGAIN


def test_nobody_acts_before_all_is_told() -> None:
    told = outcomes.failure_attributes(NotFound.code, "there is no image x", NOW)
    assert list(told)[-1] == names.VM_STATE
    assert told[names.VM_OUTCOME] == outcomes.HOLD
    assert told[names.VM_STATE] == "FAILED"
    assert told[names.VM_REASON] == "NOT_FOUND: there is no image x"


def test_users_are_told_what_they_can_do_with_htcondor() -> None:
    told = outcomes.failure_attributes(
        "OUTPUT_TOO_LARGE", "more than 128 MiB; ask for more with --disk", NOW
    )
    assert told[names.VM_REASON] == (
        "OUTPUT_TOO_LARGE: the job wrote more than its disk; ask for more with request_disk"
    )


@pytest.mark.parametrize("code", ["OUTPUT_MISSING", "SCRIPT_FAILED", "SCRIPT_KILLED"])
def test_nobody_takes_our_script_for_the_job(code: str) -> None:
    told = str(
        outcomes.failure_attributes(code, "the script exited with status 1", NOW)[names.VM_REASON]
    )
    assert told.startswith(f"{code}: {outcomes.OUTCOMES[code].why}; the script exited with status 1 (")
    assert told.endswith("not the job)")


@pytest.mark.parametrize(
    ("exit", "state", "reason"),
    [
        (ended(0), "COMPLETED", "SUCCEEDED: the job exited with status 0"),
        (ended(1), "FAILED", "JOB_FAILED: the job exited with status 1"),
        (ended(signal=9), "FAILED", "JOB_KILLED: the job was killed by signal 9"),
    ],
)
def test_the_jobs_own_end_is_told_as_it_was(exit: ExitStatus, state: str, reason: str) -> None:
    told = {names.VM_STATE: state, names.VM_REASON: reason, names.VM_OUTCOME: outcomes.JOB_END}
    assert outcomes.job_end_attributes(exit) == told
    is_out_of_memory = outcomes.job_end_attributes(exit, is_out_of_memory=True)
    assert is_out_of_memory[names.VM_STATE] == state
    why = str(is_out_of_memory[names.VM_REASON])
    assert why.startswith(f"OUT_OF_MEMORY: {reason.partition(': ')[2]}; ")
    assert why.endswith("; ask for more with request_memory")


TOLD_TO_LEAVE = "EVICTED: HTCondor told the job to leave its node (signal 15)"


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (RunResult(stopped=15), TOLD_TO_LEAVE),
        (RunResult(stopped=15, code="EVICTED", why="stopped by signal 15"), TOLD_TO_LEAVE),
        (RunResult(ended(5), stopped=15), f"{TOLD_TO_LEAVE}, and it exited with status 5"),
        (RunResult(ended(signal=15), stopped=15), f"{TOLD_TO_LEAVE}, and it was killed by signal 15"),
        (RunResult(stopped=15, code="GUEST_LOST", why="gone"), f"{TOLD_TO_LEAVE}; GUEST_LOST: gone"),
        (RunResult(stopped=15, code="CHECKPOINTED", why="saved"), "CHECKPOINTED: saved"),
    ],
)
def test_a_job_that_was_told_to_leave_says_so(end: RunResult, reason: str) -> None:
    told = outcomes.transparent_eviction_attributes(end, 2)
    assert told == {names.VM_STATE: "PREEMPTED", names.VM_REASON: reason, names.VM_VACATED: 3}


@pytest.mark.parametrize(
    ("status", "lost"), [(1, True), (2, False), (3, True), (4, True), (5, True), (6, False), (7, False)]
)
def test_how_far_a_job_is_holds_only_as_long_as_it_runs(status: int, *, lost: bool) -> None:
    """The program that runs the job may be killed with the starter, before its last report."""
    ad = classad2.ClassAd({"JobStatus": status})
    for name, value in outcomes.progress_attributes("RUNNING", 'PROGRESS: "run"').items():
        assert isinstance(value, ClassAdExpression)
        assert len(value.text.encode()) <= VALUE_MAX
        ad[name] = classad2.ExprTree(value.text)
    assert ad.eval(names.VM_STATE) == ("PREEMPTED" if lost else "RUNNING")
    before = "EXEC_LOST: the program that runs the job was killed; last report: " if lost else ""
    assert ad.eval(names.VM_REASON) == f'{before}PROGRESS: "run"'
    ad[names.VM_STATE] = "COMPLETED"  # the state arrives before its reason
    assert ad.eval(names.VM_REASON) == 'PROGRESS: "run"'


def test_however_long_the_last_word_is_it_gets_into_the_ad() -> None:
    for text in ("\U0001f600 " * 999, '" ' * 999):
        for value in outcomes.progress_attributes("RUNNING", text).values():
            assert isinstance(value, ClassAdExpression)
            assert len(value.text.encode()) <= VALUE_MAX
            assert classad2.ExprTree(value.text)


def test_the_schedds_policy_uses_the_same_words() -> None:
    policy = (ROOT / "condor/config/schedd.conf").read_text("utf-8")
    for word in (names.VM_STATE, names.VM_SUBCODE, names.VM_REASON, names.WANTED_IMAGE):
        assert word in policy
    assert f'=?= "{outcomes.HOLD}"' in policy
    assert f'=?= "{outcomes.AGAIN}"' in policy
    lost = outcomes.OUTCOMES[outcomes.EXEC_LOST]
    assert f'ChirpVMSubCode =?= {lost.subcode}, strcat("{outcomes.EXEC_LOST}: {lost.why}; ' in policy
    assert f"SET ChirpVMSubCode {lost.subcode}\n" in policy
    assert outcomes.start_attributes(NOW)[names.VM_SUBCODE] == lost.subcode
    assert f"   SET {names.WAITS} {outcomes.wait_expression('VMJobTries')}\n" in policy, (
        "as for the service's jobs"
    )
    assert f"SET {names.POLICY} {names.POLICY_VERSION}\n" in policy
    node = (ROOT / "condor/config/node.conf").read_text("utf-8")
    assert f"TARGET.{names.POLICY} =?= {names.POLICY_VERSION})" in node, "schedds and nodes have one"


def decided(name: str, **job: object) -> bool:
    """Whether an attribute that the schedd's policy sets is true for this job."""
    policy = (ROOT / "condor/config/schedd.conf").read_text("utf-8")
    set_there = dict(re.findall(r"^   SET (\w+) (.*)$", policy, re.MULTILINE))
    ad = classad2.ClassAd({"VMJobImage": "x", "VMJobMaxStarts": 5, names.VM_VACATED: 0, **job})
    if job.get("VMJobImage", "") is None:
        del ad["VMJobImage"]
    for needed in ("VMJobTries", "VMJobWanted", "VMJobOver", "VMJobAgain"):
        ad[needed] = classad2.ExprTree(set_there[needed])
    return classad2.ExprTree(set_there[name]).eval(ad) is True


#: Values of VMJobImage in the job's ad, and whether each requests a VM. A word without quotes is the
#: name of an attribute that does not exist.
IMAGES = [('"generic"', True), ("generic", True), ("5", True), ("undefined", False), (None, False)]


@pytest.mark.parametrize(("written", "wanted"), IMAGES)
@pytest.mark.parametrize("name", ["schedd", "submit", "submit-router"])
def test_a_job_with_an_image_has_the_policy_however_it_was_written(
    name: str, written: str | None, *, wanted: bool
) -> None:
    config = (ROOT / f"condor/config/{name}.conf").read_text("utf-8")
    (demand,) = re.findall(r"^   REQUIREMENTS (.*VMJobImage.*)$", config, re.MULTILINE)
    grid = {"JobUniverse": 9, "GridResource": "condor site.grid site.grid"}
    ad = classad2.ClassAd(grid if name == "submit" else {"JobUniverse": 5})
    if written is not None:
        ad["VMJobImage"] = classad2.ExprTree(written)
    assert (classad2.ExprTree(demand).eval(ad) is True) is wanted


@pytest.mark.parametrize(("written", "wanted"), IMAGES)
def test_a_job_is_held_however_its_image_was_written(written: str | None, *, wanted: bool) -> None:
    image = None if written is None else classad2.ExprTree(written)
    told = {"VMJobImage": image, "NumJobStarts": 1}
    assert decided("VMJobAgain", **told) is wanted
    told |= {names.VM_OUTCOME: outcomes.HOLD, names.VM_STATE: "FAILED"}
    assert decided("VMJobHold", **told) is wanted


@pytest.mark.parametrize(
    ("state", "outcome", "again", "held"),
    [
        (None, "again", True, False),  # no report
        ("COMPLETED", "again", False, False),  # the attributes sent with that state may be lost
        ("FAILED", "again", False, False),
        ("FAILED", "own", False, False),
        ("FAILED", "hold", False, True),
        ("PREEMPTED", "again", True, False),
        (outcomes.progress_attributes("RUNNING", "it runs")[names.VM_STATE], "again", True, False),
        (outcomes.start_attributes(NOW)[names.VM_STATE], "hold", True, False),  # of an earlier attempt
    ],
)
def test_the_jobs_own_end_is_by_its_state(
    state: AttributeValue | None, outcome: str, *, again: bool, held: bool
) -> None:
    """Only the state is sent at once: an attribute sent at once is an event in the job's log."""
    told: dict[str, object] = {names.VM_OUTCOME: outcome, "NumJobStarts": 1, "JobStatus": 2}
    if state is not None:
        expression = isinstance(state, ClassAdExpression)
        told[names.VM_STATE] = classad2.ExprTree(state.text) if expression else state
    assert decided("VMJobAgain", **told) is again
    assert decided("VMJobHold", **told) is held


def waits(tried: float | None, starts: int, outcome: str = outcomes.AGAIN) -> bool:
    """Whether the policy makes a job wait whose last attempt was ``tried`` seconds ago."""
    job: dict[str, object] = {names.VM_OUTCOME: outcome, "NumJobStarts": starts}
    if tried is not None:
        job[names.VM_TRIED] = int(time.time() - tried)
    return decided("VMJobWaits", **job)


@pytest.mark.parametrize(
    ("starts", "vacated", "held"), [(4, 0, False), (5, 0, True), (9, 5, False), (10, 5, True)]
)
def test_to_be_vacated_is_no_failure(starts: int, vacated: int, *, held: bool) -> None:
    """A job with many evictions is not held when a node fails for the first time."""
    assert outcomes.eviction_attributes(vacated) == {names.VM_VACATED: vacated + 1}
    told = {"NumJobStarts": starts, names.VM_VACATED: vacated, names.VM_OUTCOME: outcomes.AGAIN}
    assert decided("VMJobHold", **told) is held
    late = outcomes.retry_delay_seconds(starts - vacated) + 1
    assert not decided("VMJobWaits", **told, **{names.VM_TRIED: int(time.time() - late)})


@pytest.mark.parametrize("starts", [1, 2, 5, 7, 8, 50])
def test_what_failed_waits_longer_each_time(starts: int) -> None:
    pause = outcomes.retry_delay_seconds(starts)
    assert waits(0, starts)
    assert waits(pause - 2, starts)
    assert not waits(pause + 1, starts)
    assert not waits(0, starts, outcomes.HOLD)


def test_nobody_else_waits() -> None:
    assert not waits(None, 0)
    assert not waits(None, 3)
    assert not waits(-62, 1), "the node's clock is wrong"
    assert waits(-50, 1)


def test_pauses_are_bounded() -> None:
    assert [outcomes.retry_delay_seconds(starts) for starts in (1, 2, 3, 7, 8, 1000)] == [
        5,
        10,
        20,
        320,
        600,
        600,
    ]


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/htcondor-jobs.md").read_text("utf-8")
    for code, outcome in outcomes.OUTCOMES.items():
        assert f"| `{code}` | {outcome.subcode} | {outcome.action} | {outcome.why} |" in page
    rest = outcomes.UNKNOWN
    assert f"| any other | {rest.subcode} | {rest.action} | {rest.why} |" in page
