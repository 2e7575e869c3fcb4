"""What HTCondor does with an unchanged job for each way in which its machine can fail.

The job's own end is its own affair: exit status and signal pass through untouched. Otherwise
``exec-unchanged`` writes an outcome into the job's ad, and the policy that
``condor/config/schedd.conf`` adds to such jobs acts on it when they exit. It begins with "again", so
that its own death is no end of the job's.

A job is at its own end where its state is COMPLETED, or FAILED without an outcome of "hold". That state
is written at once, and again until the schedd has it. All others come with the job's exit, together:
where that is lost, so are they, and the job is tried again.

========  ==============================================================================
hold      whoever submitted the job has to change something: it is held (HoldReasonCode 3,
          our own HoldReasonSubCode, a sentence)
again     the node or something that passes failed: back to idle, to be tried elsewhere
          after a while (:func:`pause`), and held once it was begun ``VMJobMaxStarts`` times
========  ==============================================================================
"""

from __future__ import annotations

from types import MappingProxyType

from condor import names
from condor.chirp import Expression, literal
from vmjobs.errors import (
    Forbidden,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    StorageFull,
    Unauthenticated,
    Unavailable,
    VMJobsError,
)
from vmjobs.states import JobState, ReasonCode
from vmjobs.unchanged_job import UNSUITABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Final

    from condor.chirp import Told
    from vmjobs.ports import ClassAdValue
    from vmjobs.unchanged_job import End, Exit

HOLD: Final = "hold"
AGAIN: Final = "again"
#: The job's own.
OWN: Final = "own"
#: The code of an end of which nobody told.
LOST: Final = "EXEC_LOST"
#: Seconds from the first try of a job to the second, and from any to the next at most.
FIRST_PAUSE: Final = 5
LONGEST_PAUSE: Final = 600
#: How many things that did not come back a job's ad names.
MOST_REJECTED: Final = 20


class Outcome:
    """deed: HOLD or AGAIN. subcode: HoldReasonSubCode of a job that is held for it. why: in words.

    remedy: what users of HTCondor do about it, in place of a sentence for those of our own commands.
    about: what the sentence speaks of, where users would take that for something of theirs.
    """

    def __init__(self, deed: str, subcode: int, why: str, remedy: str = "", about: str = "") -> None:
        self.deed = deed
        self.subcode = subcode
        self.why = why
        self.remedy = remedy
        self.about = about


_SCRIPT: Final = "a script of vmjobs' own, not the job"

#: By the code of what went wrong. Sub-codes are stable: users' policies may compare with them.
OUTCOMES: Final[Mapping[str, Outcome]] = MappingProxyType(
    {
        NotFound.code: Outcome(HOLD, 101, "no image of that name that everybody may use"),
        ReasonCode.IMAGE_REJECTED.value: Outcome(HOLD, 102, "the image is not allowed on this node"),
        UNSUITABLE: Outcome(HOLD, 103, "the image lacks what an unchanged job needs"),
        InvalidRequest.code: Outcome(HOLD, 104, "the job asks for what cannot be"),
        PayloadTooLarge.code: Outcome(
            HOLD, 105, "the job's files are larger than its disk", "ask for more with request_disk"
        ),
        ReasonCode.OUTPUT_TOO_LARGE.value: Outcome(
            HOLD, 106, "the job wrote more than its disk", "ask for more with request_disk"
        ),
        ReasonCode.CONSOLE_FLOODED.value: Outcome(HOLD, 107, "the console grew beyond its limit"),
        ReasonCode.KERNEL_PANIC.value: Outcome(HOLD, 108, "the guest's kernel panicked"),
        ReasonCode.BOOT_TIMED_OUT.value: Outcome(HOLD, 109, "the guest was not ready in time"),
        ReasonCode.NO_EXIT_REPORT.value: Outcome(HOLD, 110, "the guest did not say how the job ended"),
        ReasonCode.TIMED_OUT.value: Outcome(HOLD, 111, "the job ran for longer than any may"),
        Forbidden.code: Outcome(AGAIN, 120, "the node does not take the job"),
        Unavailable.code: Outcome(AGAIN, 121, "the agent, or what it needs, does not answer"),
        ReasonCode.BOOT_FAILED.value: Outcome(AGAIN, 122, "the machine did not start"),
        ReasonCode.GUEST_LOST.value: Outcome(
            AGAIN, 123, "the machine ended, fell silent, or could not send all"
        ),
        ReasonCode.IMAGE_UNAVAILABLE.value: Outcome(AGAIN, 124, "the image could not be fetched"),
        ReasonCode.NO_HYPERVISOR.value: Outcome(AGAIN, 126, "no hypervisor here boots the image"),
        ReasonCode.NODE_FAILED.value: Outcome(AGAIN, 127, "the node failed"),
        ReasonCode.OUTPUT_MISSING.value: Outcome(
            AGAIN, 128, "what the job left did not come back", about=_SCRIPT
        ),
        ReasonCode.SCRIPT_FAILED.value: Outcome(
            AGAIN, 129, "the guest could not run the job", about=_SCRIPT
        ),
        ReasonCode.SCRIPT_KILLED.value: Outcome(
            AGAIN, 130, "the guest could not run the job", about=_SCRIPT
        ),
        ReasonCode.INTERNAL.value: Outcome(AGAIN, 131, "the agent failed"),
        LOST: Outcome(AGAIN, 132, "what runs the job on its node was killed"),
        StorageFull.code: Outcome(AGAIN, 133, "the node has no room for the job's disk"),
        ReasonCode.NOT_RESUMED.value: Outcome(AGAIN, 135, "the machine that was saved does not go on"),
        Unauthenticated.code: Outcome(
            AGAIN,
            134,
            "the repository does not know the node",
            about="the node's token, not the user's",
        ),
    }
)
#: The code of a job's own end, where a lack of memory may be why.
STARVED: Final = "OUT_OF_MEMORY"
STARVED_WHY: Final = "the machine had no memory left, and its kernel killed processes"
STARVED_REMEDY: Final = "ask for more with request_memory"
#: Whether HTCondor has a job run: it does, brings its output back, or has suspended it.
_RUNS: Final = "JobStatus == 2 || JobStatus == 6 || JobStatus == 7"
#: Bytes of what a job's ad says of how far it is.
_LAST_WORD: Final = 300
UNKNOWN: Final = Outcome(AGAIN, 199, "something else")


def outcome_of(code: str) -> Outcome:
    """What becomes of a job for the code of what went wrong."""
    return OUTCOMES.get(code, UNKNOWN)


def is_held(code: str) -> bool:
    """Whether a job is held for it, until its user has changed something."""
    return outcome_of(code).deed == HOLD


def pause(starts: int) -> int:
    """Seconds from one try of a job to the next, after so many of them (1, 2, ...)."""
    return FIRST_PAUSE * 2 ** (max(starts, 1) - 1) if starts < 8 else LONGEST_PAUSE


def waits(tries: str) -> str:
    """Whether a job that failed has to wait yet: a ClassAd expression, in the job's ad. By the clock of
    its node, unless that is ahead by more than a minute. tries: how often it was begun, an expression.
    """
    pause = f"ifThenElse({tries} < 8, {FIRST_PAUSE} * pow(2, {tries} - 1), {LONGEST_PAUSE})"
    return (
        f'{names.VM_OUTCOME} =?= "{AGAIN}" && time() > {names.VM_TRIED} - 60'
        f" && time() < {names.VM_TRIED} + {pause}"
    )


def under_way(state: str, reason: str) -> dict[str, Told]:
    """What the job's ad has to say of a job that has come this far, for as long as HTCondor has it run.

    What runs it may be killed and have no time to say more, as by ``condor_vacate_job -fast``: then the
    same attributes say that, until something else is told.
    """
    lost = f"{LOST}: {OUTCOMES[LOST].why}; its last word: "
    preempted = literal(JobState.PREEMPTED.value)
    is_lost = f"{names.VM_STATE} =?= {preempted}"
    return {
        names.VM_STATE: Expression(f"ifThenElse({_RUNS}, {literal(state)}, {preempted})"),
        names.VM_REASON: Expression(
            f'strcat(ifThenElse({is_lost}, {literal(lost)}, ""), {literal(reason, _LAST_WORD)})'
        ),
    }


def rejected(entries: Sequence[tuple[str, str]]) -> dict[str, ClassAdValue]:
    """What the job's ad has to say of what the job left and did not come back: names, and why."""
    said = [f"{name[:200]!r}: {why}" for name, why in entries[:MOST_REJECTED]]
    if len(entries) > MOST_REJECTED:
        said.append(f"and {len(entries) - MOST_REJECTED} more")
    return {names.VM_REJECTED: "; ".join(said)}


def own(exit: Exit, *, starved: bool = False) -> dict[str, ClassAdValue]:
    """What the job's ad has to say of the job's own end. starved: its machine had no memory left."""
    code = "SUCCEEDED" if exit.ok else "JOB_FAILED" if exit.signal is None else "JOB_KILLED"
    why = f"the job {_exited(exit)}"
    if starved:
        code, why = STARVED, f"{why}; {STARVED_WHY}; {STARVED_REMEDY}"
    return {
        names.VM_STATE: (JobState.COMPLETED if exit.ok else JobState.FAILED).value,
        names.VM_REASON: f"{code}: {why}",
        names.VM_OUTCOME: OWN,
    }


def _exited(exit: Exit) -> str:
    if exit.signal is not None:
        return f"was killed by signal {exit.signal}"
    return f"exited with status {exit.code}"


def attributes(code: str, why: str, now: float) -> dict[str, ClassAdValue]:
    """What the job's ad has to say of any other. now: seconds of the epoch."""
    outcome = outcome_of(code)
    if outcome.remedy:
        why = f"{outcome.why}; {outcome.remedy}"
    if outcome.about:
        why = f"{outcome.why}; {why} ({outcome.about})"
    state = JobState.FAILED if outcome.deed == HOLD else JobState.PREEMPTED
    return {
        names.VM_SUBCODE: outcome.subcode,
        names.VM_REASON: f"{code}: {why}",
        names.VM_TRIED: int(now),
        names.VM_OUTCOME: outcome.deed,
        names.VM_STATE: state.value,  # last: where the others are missing it is no end of the job's
    }


def begun(now: float) -> dict[str, Told]:
    """The same of a job that has begun. That becomes of it unless something else is told; the reason is
    how far it is, and the policy has one of its own for this end.
    """
    lost = OUTCOMES[LOST]
    return {
        names.VM_SUBCODE: lost.subcode,
        **under_way(JobState.STAGING.value, "the job began"),
        names.VM_TRIED: int(now),
        names.VM_OUTCOME: lost.deed,
    }


def elsewhere(now: float) -> dict[str, ClassAdValue]:
    """The same of a job of the service's that its node has failed."""
    return {names.VM_TRIED: int(now), names.VM_OUTCOME: AGAIN}


def vacated(before: int) -> dict[str, ClassAdValue]:
    """The same of a job that leaves because it was told to. before: how often it has done so."""
    return {names.VM_VACATED: before + 1}


def left(end: End, before: int) -> dict[str, ClassAdValue]:
    """The same of an unchanged job, with how its run ended then. It may be vacated, held or removed."""
    code, why = (
        ReasonCode.EVICTED.value,
        f"HTCondor told the job to leave its node (signal {end.stopped})",
    )
    if end.exit is not None:
        why = f"{why}, and it {_exited(end.exit)}"
    elif end.code == ReasonCode.CHECKPOINTED:
        code, why = end.code, end.why
    elif end.code and end.code != code:
        why = f"{why}; {end.code}: {end.why}"
    return {
        names.VM_STATE: JobState.PREEMPTED.value,
        names.VM_REASON: f"{code}: {why}",
        **vacated(before),
    }


def failure(error: VMJobsError, now: float) -> dict[str, ClassAdValue]:
    """The same for an error."""
    return attributes(error.code, error.message, now)
