"""Outcomes of transparent jobs: what HTCondor does for each failure of a job's VM.

If the job itself ends, its exit status or signal passes through unchanged. Otherwise ``exec-unchanged``
writes an outcome into the job's ad, and the policy that ``condor/config/schedd.conf`` adds to such jobs
acts on it when they exit. The first outcome written is "again", so that the death of ``exec-unchanged``
does not count as the job's end.

A job has ended by itself if its state is COMPLETED, or FAILED without the outcome "hold". That state
is written immediately, and repeated until the schedd has it. All other attributes are written together,
with the job's exit: if that update is lost, they all are, and the job is tried again.

========  ==============================================================================
hold      the user has to change something: the job is held (HoldReasonCode 3, a
          HoldReasonSubCode of vmjobs, a message)
again     the node failed, or something temporary: back to idle, to be tried elsewhere
          after a delay (:func:`retry_delay_seconds`), and held after ``VMJobMaxStarts`` starts
========  ==============================================================================
"""

from __future__ import annotations

from condor import names
from condor.node.chirp import ClassAdExpression, literal
from vmjobs.errors import (
    Forbidden,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    StorageFull,
    Unauthenticated,
    Unavailable,
)
from vmjobs.states import JobState, ReasonCode
from vmjobs.transparent_job import IMAGE_UNSUITABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Final

    from condor.node.chirp import AttributeValue
    from vmjobs.cluster.pool import ClassAdValue
    from vmjobs.transparent_job import Exit, RunResult

HOLD: Final = "hold"
AGAIN: Final = "again"
#: The job ended by itself.
JOB_END: Final = "own"
#: The code of an end that was not reported.
EXEC_LOST: Final = "EXEC_LOST"
#: Seconds from a job's first attempt to its second, and the longest delay between two attempts.
FIRST_RETRY_DELAY_SECONDS: Final = 5
MAX_RETRY_DELAY_SECONDS: Final = 600
#: How many rejected outputs a job's ad lists.
MAX_REJECTED_OUTPUTS: Final = 20


class JobOutcome:
    """What HTCondor does with a job for one failure code.

    action: HOLD or AGAIN. subcode: HoldReasonSubCode of a held job. why: the reason, in words.
    remedy: advice for users of HTCondor, replaces the advice for users of ``vmjobs`` commands.
    about: the subject of the message, if users would otherwise take it for something of their own.
    """

    def __init__(self, action: str, subcode: int, why: str, remedy: str = "", about: str = "") -> None:
        self.action = action
        self.subcode = subcode
        self.why = why
        self.remedy = remedy
        self.about = about


_SCRIPT: Final = "a script of vmjobs' own, not the job"

#: By the failure's code. Sub-codes are stable: users' policies may compare with them.
OUTCOMES: Final[Mapping[str, JobOutcome]] = {
    NotFound.code: JobOutcome(HOLD, 101, "no image of that name that everybody may use"),
    ReasonCode.IMAGE_REJECTED: JobOutcome(HOLD, 102, "the image is not allowed on this node"),
    IMAGE_UNSUITABLE: JobOutcome(HOLD, 103, "the image lacks programs that the job needs"),
    InvalidRequest.code: JobOutcome(HOLD, 104, "the job's request is invalid"),
    PayloadTooLarge.code: JobOutcome(
        HOLD, 105, "the job's files are larger than its disk", "ask for more with request_disk"
    ),
    ReasonCode.OUTPUT_TOO_LARGE: JobOutcome(
        HOLD, 106, "the job wrote more than its disk", "ask for more with request_disk"
    ),
    ReasonCode.CONSOLE_FLOODED: JobOutcome(HOLD, 107, "the console grew beyond its limit"),
    ReasonCode.KERNEL_PANIC: JobOutcome(HOLD, 108, "the guest's kernel panicked"),
    ReasonCode.BOOT_TIMED_OUT: JobOutcome(HOLD, 109, "the guest was not ready in time"),
    ReasonCode.NO_EXIT_REPORT: JobOutcome(HOLD, 110, "the guest did not say how the job ended"),
    ReasonCode.TIMED_OUT: JobOutcome(HOLD, 111, "the job ran longer than the limit"),
    Forbidden.code: JobOutcome(AGAIN, 120, "the node does not take the job"),
    Unavailable.code: JobOutcome(AGAIN, 121, "the agent, or a service it needs, does not answer"),
    ReasonCode.BOOT_FAILED: JobOutcome(AGAIN, 122, "the VM did not start"),
    ReasonCode.GUEST_LOST: JobOutcome(AGAIN, 123, "the VM ended, stopped responding, or lost output"),
    ReasonCode.IMAGE_UNAVAILABLE: JobOutcome(AGAIN, 124, "the image could not be fetched"),
    ReasonCode.NO_HYPERVISOR: JobOutcome(AGAIN, 126, "no hypervisor here boots the image"),
    ReasonCode.NODE_FAILED: JobOutcome(AGAIN, 127, "the node failed"),
    ReasonCode.OUTPUT_MISSING: JobOutcome(
        AGAIN, 128, "the job's outputs were not transferred", about=_SCRIPT
    ),
    ReasonCode.SCRIPT_FAILED: JobOutcome(AGAIN, 129, "the guest could not run the job", about=_SCRIPT),
    ReasonCode.SCRIPT_KILLED: JobOutcome(AGAIN, 130, "the guest could not run the job", about=_SCRIPT),
    ReasonCode.INTERNAL: JobOutcome(AGAIN, 131, "the agent failed"),
    EXEC_LOST: JobOutcome(AGAIN, 132, "the program that runs the job was killed"),
    StorageFull.code: JobOutcome(AGAIN, 133, "the node has no room for the job's disk"),
    ReasonCode.NOT_RESUMED: JobOutcome(AGAIN, 135, "the VM cannot resume from its checkpoint"),
    Unauthenticated.code: JobOutcome(
        AGAIN, 134, "the repository does not know the node", about="the node's token, not the user's"
    ),
}
#: The code of a job's own end, if a lack of memory may be the reason.
OUT_OF_MEMORY: Final = "OUT_OF_MEMORY"
OUT_OF_MEMORY_REASON: Final = "the VM ran out of memory, and its kernel killed processes"
OUT_OF_MEMORY_ADVICE: Final = "ask for more with request_memory"
#: Whether HTCondor has a node run a job: it runs, transfers its output, or is suspended.
_IS_RUNNING: Final = "JobStatus == 2 || JobStatus == 6 || JobStatus == 7"
#: The longest progress message in a job's ad, in bytes.
_MAX_PROGRESS_BYTES: Final = 300
UNKNOWN: Final = JobOutcome(AGAIN, 199, "another failure")


def outcome_of(code: str) -> JobOutcome:
    return OUTCOMES.get(code, UNKNOWN)


def is_held(code: str) -> bool:
    """Whether a job with this code is held until its user has changed something."""
    return outcome_of(code).action == HOLD


def retry_delay_seconds(starts: int) -> int:
    """Seconds until a job's next attempt, after this number of starts (1, 2, ...)."""
    return (
        FIRST_RETRY_DELAY_SECONDS * 2 ** (max(starts, 1) - 1) if starts < 8 else MAX_RETRY_DELAY_SECONDS
    )


def wait_expression(tries: str) -> str:
    """A ClassAd expression for the job's ad: true while a job that failed has to wait.

    Uses its node's time stamp, unless that is ahead by more than a minute. tries: number of attempts,
    an expression.
    """
    doubled = f"{FIRST_RETRY_DELAY_SECONDS} * pow(2, {tries} - 1)"
    delay = f"ifThenElse({tries} < 8, {doubled}, {MAX_RETRY_DELAY_SECONDS})"
    return (
        f'{names.VM_OUTCOME} =?= "{AGAIN}" && time() > {names.VM_TRIED} - 60'
        f" && time() < {names.VM_TRIED} + {delay}"
    )


def progress_attributes(state: str, reason: str) -> dict[str, AttributeValue]:
    """Attributes for a job in this state, which are valid while HTCondor has a node run it.

    ``exec-unchanged`` may be killed before it writes anything else, as by ``condor_vacate_job -fast``:
    then these expressions evaluate to that failure, until other values are written.
    """
    lost = f"{EXEC_LOST}: {OUTCOMES[EXEC_LOST].why}; last report: "
    preempted = literal(JobState.PREEMPTED.value)
    is_lost = f"{names.VM_STATE} =?= {preempted}"
    return {
        names.VM_STATE: ClassAdExpression(f"ifThenElse({_IS_RUNNING}, {literal(state)}, {preempted})"),
        names.VM_REASON: ClassAdExpression(
            f'strcat(ifThenElse({is_lost}, {literal(lost)}, ""), '
            f"{literal(reason, _MAX_PROGRESS_BYTES)})"
        ),
    }


def rejected_output_attributes(entries: Sequence[tuple[str, str]]) -> dict[str, ClassAdValue]:
    said = [f"{name[:200]!r}: {why}" for name, why in entries[:MAX_REJECTED_OUTPUTS]]
    if len(entries) > MAX_REJECTED_OUTPUTS:
        said.append(f"and {len(entries) - MAX_REJECTED_OUTPUTS} more")
    return {names.VM_REJECTED: "; ".join(said)}


def job_end_attributes(exit: Exit, *, is_out_of_memory: bool = False) -> dict[str, ClassAdValue]:
    """Attributes for the job's own end. is_out_of_memory: its VM ran out of memory."""
    code = "SUCCEEDED" if exit.ok else "JOB_FAILED" if exit.signal is None else "JOB_KILLED"
    why = f"the job {_exited(exit)}"
    if is_out_of_memory:
        code, why = OUT_OF_MEMORY, f"{why}; {OUT_OF_MEMORY_REASON}; {OUT_OF_MEMORY_ADVICE}"
    return {
        names.VM_STATE: (JobState.COMPLETED if exit.ok else JobState.FAILED).value,
        names.VM_REASON: f"{code}: {why}",
        names.VM_OUTCOME: JOB_END,
    }


def _exited(exit: Exit) -> str:
    if exit.signal is not None:
        return f"was killed by signal {exit.signal}"
    return f"exited with status {exit.code}"


def failure_attributes(code: str, why: str, now: float) -> dict[str, ClassAdValue]:
    """Attributes for any other end. now: seconds since the epoch."""
    outcome = outcome_of(code)
    if outcome.remedy:
        why = f"{outcome.why}; {outcome.remedy}"
    if outcome.about:
        why = f"{outcome.why}; {why} ({outcome.about})"
    state = JobState.FAILED if outcome.action == HOLD else JobState.PREEMPTED
    return {
        names.VM_SUBCODE: outcome.subcode,
        names.VM_REASON: f"{code}: {why}",
        names.VM_TRIED: int(now),
        names.VM_OUTCOME: outcome.action,
        names.VM_STATE: state.value,  # last: without the others it does not count as the job's end
    }


def start_attributes(now: float) -> dict[str, AttributeValue]:
    """Attributes for a job that has begun: those of EXEC_LOST, until others are written.

    The reason is the job's progress; the policy adds that of EXEC_LOST itself.
    """
    lost = OUTCOMES[EXEC_LOST]
    return {
        names.VM_SUBCODE: lost.subcode,
        **progress_attributes(JobState.STAGING.value, "the job began"),
        names.VM_TRIED: int(now),
        names.VM_OUTCOME: lost.action,
    }


def node_failure_attributes(now: float) -> dict[str, ClassAdValue]:
    """Attributes for a job of the service that its node has failed."""
    return {names.VM_TRIED: int(now), names.VM_OUTCOME: AGAIN}


def eviction_attributes(before: int) -> dict[str, ClassAdValue]:
    """Attributes for an evicted job. before: number of earlier evictions."""
    return {names.VM_VACATED: before + 1}


def transparent_eviction_attributes(end: RunResult, before: int) -> dict[str, ClassAdValue]:
    """Attributes for a transparent job that is vacated, held or removed, from its run's end."""
    code = ReasonCode.EVICTED.value
    why = f"HTCondor told the job to leave its node (signal {end.stopped})"
    if end.exit is not None:
        why = f"{why}, and it {_exited(end.exit)}"
    elif end.code == ReasonCode.CHECKPOINTED:
        code, why = end.code, end.why
    elif end.code and end.code != code:
        why = f"{why}; {end.code}: {end.why}"
    return {
        names.VM_STATE: JobState.PREEMPTED.value,
        names.VM_REASON: f"{code}: {why}",
        **eviction_attributes(before),
    }
