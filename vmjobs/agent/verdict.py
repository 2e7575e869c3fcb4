"""How a run ended: pure functions from what was seen to the job's outcome."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType

from vmjobs.agent.inbox import LeaseLost, Observation, Superseded
from vmjobs.errors import (
    DigestMismatch,
    ImageRejected,
    NotFound,
    Unauthenticated,
    Unavailable,
    VMJobsError,
    reason_of,
)
from vmjobs.hypervisor.base import Ending
from vmjobs.model import (
    CONSOLE_RULE,
    MENDED_ELSEWHERE,
    POWEROFF,
    REPORT,
    ExitChannel,
    ExitStatus,
    JobState,
    Reason,
    ReasonCode,
    reason,
)

#: What HTCondor tells a job that is to leave its node (``kill_sig``), whether it is vacated, held or
#: removed. (Where a job has a ``remove_kill_sig`` as well, HTCondor 23.9.6 sends that in any case.)
VACATING = 15
#: Signals that mean "stop": the script gets them, and then a few seconds.
STOPPING = frozenset({2, 3, VACATING})
#: Exit status of ``vmjobs exec`` and ``vmjobs run`` when there is none of the script to pass on.
#: (env(1), nice(1) and their like use 125 for their own failures.)
NO_STATUS = 125

_NOTHING: Mapping[str, str] = MappingProxyType({})
#: What an x86 kernel panics with that waits for a timer in vain (arch/x86/kernel/apic/io_apic.c).
NO_TIMER = "IO-APIC + timer doesn't work"


@dataclass(frozen=True)
class Verdict:
    """A run's end: the job's next state, why, and the script's exit status where there is one.

    unfit: it was for what is wrong with this node, whatever job comes next.
    """

    state: JobState
    reason: Reason
    exit: ExitStatus | None = None
    unfit: bool = False

    @property
    def exit_code(self) -> int:
        """What ``vmjobs exec`` exits with: the script's status, never 0 for a failed job."""
        if self.state is JobState.COMPLETED:
            return 0
        code = self.exit.shell_code if self.exit else NO_STATUS
        return code or NO_STATUS


class Ended(Exception):
    """Raised inside a run to end it with a verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason.message)
        self.verdict = verdict


def failed(
    code: ReasonCode, message: str, exit: ExitStatus | None = None, *, unfit: bool = False
) -> Ended:
    """The end of a run that failed."""
    return Ended(Verdict(JobState.FAILED, reason(code, message), exit, unfit))


#: What a system says where a disk is full.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
#: What a system says of itself: no room, no memory, no rights, a bad disk. (Whoever may connect to the
#: agent can have it run out of files.)
_OF_THE_NODE = NO_ROOM | {errno.EIO, errno.EROFS, errno.ENOMEM, errno.EACCES}


def is_of_the_node(error: BaseException | None) -> bool:
    """Whether an error, or what it comes of, is for what is wrong with the node."""
    return comes_of(error, _OF_THE_NODE)


def comes_of(error: BaseException | None, numbers: frozenset[int]) -> bool:
    """Whether an error, or what it was raised from, is the system's with one of these numbers."""
    if error is None:
        return False
    told = isinstance(error, OSError) and error.errno in numbers
    return told or comes_of(error.__cause__, numbers)


def without_image(error: Exception) -> Ended:
    """The end of a run whose image could not be had, or not all of it."""
    message = (
        error.message if isinstance(error, VMJobsError) else f"the node failed: {reason_of(error)}"
    )
    if isinstance(error, DigestMismatch | ImageRejected):
        return failed(ReasonCode.IMAGE_REJECTED, message)
    if isinstance(error, NotFound | Unavailable):
        return failed(ReasonCode.IMAGE_UNAVAILABLE, message)
    unfit = isinstance(error, OSError) and is_of_the_node(error)
    # An image is fetched with the node's own token.
    return failed(ReasonCode.NODE_FAILED, message, unfit=unfit or isinstance(error, Unauthenticated))


def stopped(message: str, exit: ExitStatus | None = None) -> Ended:
    """The end of a run that was stopped from outside; whoever stopped it knows what for."""
    return Ended(Verdict(JobState.PREEMPTED, reason(ReasonCode.EVICTED, message), exit))


def unwanted(seen: Observation | None) -> Ended | None:
    """The end of a run that nobody wants any more, if that is what was seen."""
    if isinstance(seen, LeaseLost):
        return stopped("whoever had asked for this run is gone")
    if isinstance(seen, Superseded):
        return stopped(f"the repository takes no more word from this attempt: {seen.why}")
    return None


@dataclass(frozen=True)
class Success:
    """What counts as the job's end, and what to call it.

    subject: who ended; deed: what it did well.
    """

    exit: ExitStatus
    subject: str = "the script"
    deed: str = "succeeded"


def by_rule(rule: str, ending: Ending | None, line: str | None) -> Success | None:
    """The success that a job's ``exit`` rule makes of what was seen; ``None`` if of nothing.

    ending: how the machine ended, if it has. line: the one that the rule looks for, if it came.
    """
    if rule == POWEROFF and ending is Ending.POWEROFF:
        exit = ExitStatus(code=0, channel=ExitChannel.POWEROFF)
        return Success(exit, "the machine", "powered off by itself")
    if line is not None:
        exit = ExitStatus(code=0, channel=ExitChannel.CONSOLE)
        return Success(exit, "the console", f"showed the line {line.strip()[:200]!r}")
    return None


def judge(
    exit: ExitStatus,
    *,
    disk_full: bool,
    too_large: bool,
    missing: Sequence[str],
    lacking: Mapping[str, str] = _NOTHING,
    disk: int,
    subject: str = "the script",
    deed: str = "succeeded",
) -> Verdict:
    """The outcome of a job whose status is known and whose outputs have been looked at.

    disk: MiB that the job had; disk_full: it was used up when the script ended. missing: patterns that
    no output answers to. lacking: outputs that did not arrive, and why.
    """
    if (not exit.ok and disk_full) or too_large:
        message = f"the job wrote more than its disk of {disk} MiB; ask for more with --disk"
        return Verdict(JobState.FAILED, reason(ReasonCode.OUTPUT_TOO_LARGE, message), exit)
    if exit.signal is not None:
        message = f"{subject} was killed by signal {exit.signal}"
        return Verdict(JobState.FAILED, reason(ReasonCode.SCRIPT_KILLED, message), exit)
    if not exit.ok:
        message = f"{subject} exited with status {exit.code}"
        return Verdict(JobState.FAILED, reason(ReasonCode.SCRIPT_FAILED, message), exit)
    if missing or lacking:
        faults = [f"left nothing that matches {', '.join(missing)}"] if missing else []
        told = islice(lacking.items(), 3)
        faults += [f"its output {name[:255]!r} was not taken: {why}" for name, why in told]
        faults += [f"{len(lacking) - 3} more were not taken"] if len(lacking) > 3 else []
        message = f"{subject} {deed} but {'; '.join(faults)}"
        return Verdict(JobState.FAILED, reason(ReasonCode.OUTPUT_MISSING, message), exit)
    return Verdict(JobState.COMPLETED, reason(ReasonCode.SUCCEEDED, f"{subject} {deed}"), exit)


def judge_early_end(
    *,
    panic: str | None,
    ready: bool,
    last_lines: str,
    rule: str = REPORT,
    ending: Ending = Ending.UNKNOWN,
) -> Verdict:
    """The outcome of a machine that ended without a word and without what its rule waits for.

    panic: what the kernel said of it on the console, if it did. rule: the job's ``exit``.
    """
    code, message = _early_end(panic, ready, rule, ending)
    return Verdict(JobState.FAILED, reason(code, with_console(message, last_lines)))


def panicked(cause: str | None) -> tuple[ReasonCode, str]:
    """Why a run ended whose kernel panicked, by what it said of that.

    One that misses its timer has only waited too long for a processor of the node: that is no fault of
    the image, and passes.
    """
    if cause is not None and cause.startswith(NO_TIMER):
        return ReasonCode.GUEST_LOST, f"the node was too busy for the guest's kernel to boot: {cause}"
    return ReasonCode.KERNEL_PANIC, f"the guest's kernel panicked: {cause or 'no cause given'}"


def _early_end(panic: str | None, ready: bool, rule: str, ending: Ending) -> tuple[ReasonCode, str]:
    if panic is not None or ending is Ending.PANICKED:
        return panicked(panic)
    if ending in _LOST:
        return ReasonCode.GUEST_LOST, _LOST[ending]
    if rule == POWEROFF:
        return _no_power_off(ending)
    did = _DID.get(ending, "ended")
    if rule != REPORT:
        wanted = rule.removeprefix(CONSOLE_RULE)
        return ReasonCode.NO_EXIT_REPORT, (
            f"the machine {did} before its console had shown a line that matches /{wanted}/"
        )
    if not ready:
        return ReasonCode.BOOT_FAILED, f"the machine {did} before the guest was ready"
    did = _DID.get(ending, "powered off")
    return ReasonCode.NO_EXIT_REPORT, f"the guest {did} without reporting an exit status"


def _no_power_off(ending: Ending) -> tuple[ReasonCode, str]:
    if ending is Ending.RESET:
        return ReasonCode.NO_EXIT_REPORT, "the guest restarted its machine instead of powering off"
    return ReasonCode.GUEST_LOST, "the machine is gone, and nobody knows whether it powered off"


_DID = {Ending.POWEROFF: "powered off", Ending.RESET: "restarted"}
_LOST = {
    Ending.KILLED: "the machine was killed from outside",
    Ending.CRASHED: "the machine crashed: its hypervisor ended with an error",
}


#: What a machine comes to whose disks cannot be written, too.
_OF_A_FULL_DISK = {
    ReasonCode.BOOT_FAILED,
    ReasonCode.KERNEL_PANIC,
    ReasonCode.GUEST_LOST,
    ReasonCode.NO_EXIT_REPORT,
}


def with_a_full_disk(verdict: Verdict) -> Verdict:
    """The verdict on a machine that ran while its node had no room: that is not the job's fault."""
    if verdict.reason.code not in _OF_A_FULL_DISK:
        return verdict
    message = f"the node's disk was full while the machine ran: {verdict.reason.message}"
    return failed(ReasonCode.NODE_FAILED, message, verdict.exit, unfit=True).verdict


def mended_elsewhere(verdict: Verdict, tries_left: int) -> Verdict:
    """The verdict on a job that its node failed: it goes back to its scheduler, as often as it may. Not
    one that has run, where the service does not take what it left.
    """
    code = verdict.reason.code
    if verdict.state is not JobState.FAILED or code not in MENDED_ELSEWHERE or not tries_left:
        return verdict
    if verdict.exit is not None and code is not ReasonCode.NODE_FAILED:
        return verdict
    again = f"{verdict.reason.message}; it is run again, up to {tries_left} times"
    return replace(verdict, state=JobState.PREEMPTED, reason=reason(code, again))


def overdue(rule: str, seconds: int, *, script: bool) -> str:
    """What a job did not do within its time."""
    if rule == POWEROFF:
        return f"the machine had not powered off after {seconds} s"
    if rule != REPORT:
        wanted = rule.removeprefix(CONSOLE_RULE)
        return f"the console had not shown a line that matches /{wanted}/ after {seconds} s"
    subject = "the script was still running" if script else "the guest had not reported"
    return f"{subject} after {seconds} s"


def with_console(message: str, last_lines: str) -> str:
    """A message with the console's last lines below it."""
    return f"{message}; the console's last lines:\n{last_lines}" if last_lines else message
