"""Outcomes of transparent jobs: the table, the schedd's policy and the documentation."""

from __future__ import annotations

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
}


def test_every_failure_of_a_run_has_an_outcome_with_a_sub_code_of_its_own() -> None:
    assert set(ReasonCode) - ELSEWHERE <= outcomes.OUTCOMES.keys()
    assert len({outcome.subcode for outcome in outcomes.OUTCOMES.values()}) == len(outcomes.OUTCOMES)
    told = outcomes.failure_attributes("OF_A_LATER_RELEASE", "why", NOW)
    assert (told[names.VM_OUTCOME], told[names.VM_SUBCODE]) == (outcomes.AGAIN, 199)
    assert told[names.VM_REASON] == "OF_A_LATER_RELEASE: why"


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


def test_pauses_are_bounded() -> None:
    pauses = {1: 5, 2: 10, 3: 20, 7: 320, 8: 600, 1000: 600}
    assert {starts: outcomes.retry_delay_seconds(starts) for starts in pauses} == pauses


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/htcondor-jobs.md").read_text("utf-8")
    for code, outcome in outcomes.OUTCOMES.items():
        assert f"| `{code}` | {outcome.subcode} | {outcome.action} | {outcome.why} |" in page
    rest = outcomes.UNKNOWN
    assert f"| any other | {rest.subcode} | {rest.action} | {rest.why} |" in page
