"""Outcomes of runs: pure functions from the observed end of a run to the job's outcome."""

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

#: The signal (``kill_sig``) that HTCondor sends to a job that is vacated, held or removed.
#: (For a job that also has a ``remove_kill_sig``, HTCondor 23.9.6 sends that in every case.)
VACATING = 15
#: Signals that mean "stop": the script gets them, and a grace period after them.
STOPPING = frozenset({2, 3, VACATING})
#: Exit status of ``vmjobs exec`` and ``vmjobs run`` if there is no script status to pass on.
#: (Like env(1) and nice(1), which use 125 for their own failures.)
NO_STATUS = 125

_NOTHING: Mapping[str, str] = MappingProxyType({})
#: Panic message of an x86 kernel that gets no timer interrupt (arch/x86/kernel/apic/io_apic.c).
NO_TIMER = "IO-APIC + timer doesn't work"


@dataclass(frozen=True)
class Verdict:
    """A run's outcome: the job's next state, the reason, and the script's exit status, if any.

    node_at_fault: the node is at fault, and would fail any other job, too.
    """

    state: JobState
    reason: Reason
    exit: ExitStatus | None = None
    unfit: bool = False

    @property
    def exit_code(self) -> int:
        """The exit status of ``vmjobs exec``: the script's, but never 0 for a failed job."""
        if self.state is JobState.COMPLETED:
            return 0
        code = self.exit.shell_code if self.exit else NO_STATUS
        return code or NO_STATUS


class Ended(Exception):
    """Raised inside a run to end it with an outcome."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason.message)
        self.verdict = verdict


def failed(
    code: ReasonCode, message: str, exit: ExitStatus | None = None, *, unfit: bool = False
) -> Ended:
    """Return the end of a run that failed."""
    return Ended(Verdict(JobState.FAILED, reason(code, message), exit, unfit))


#: Error numbers that mean a full disk.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Error numbers that mean a faulty node: full or bad disk, no memory, no rights. (EMFILE is not among
#: them: any user who can connect to the agent can make it run out of file descriptors.)
_OF_THE_NODE = NO_ROOM | {errno.EIO, errno.EROFS, errno.ENOMEM, errno.EACCES}


def is_of_the_node(error: BaseException | None) -> bool:
    """Whether an error or one of its causes shows a faulty node."""
    return comes_of(error, _OF_THE_NODE)


def comes_of(error: BaseException | None, numbers: frozenset[int]) -> bool:
    """Whether an error or one of its causes is an ``OSError`` with one of these error numbers."""
    if error is None:
        return False
    told = isinstance(error, OSError) and error.errno in numbers
    return told or comes_of(error.__cause__, numbers)


def without_image(error: Exception) -> Ended:
    """Return the end of a run whose image, or a part of it, could not be fetched."""
    message = (
        error.message if isinstance(error, VMJobsError) else f"the node failed: {reason_of(error)}"
    )
    if isinstance(error, DigestMismatch | ImageRejected):
        return failed(ReasonCode.IMAGE_REJECTED, message)
    if isinstance(error, NotFound | Unavailable):
        return failed(ReasonCode.IMAGE_UNAVAILABLE, message)
    unfit = isinstance(error, OSError) and is_of_the_node(error)
    # The node fetches images with its own token.
    return failed(ReasonCode.NODE_FAILED, message, unfit=unfit or isinstance(error, Unauthenticated))


def stopped(message: str, exit: ExitStatus | None = None) -> Ended:
    """Return the end of a run that was stopped from outside, by a caller that knows the cause."""
    return Ended(Verdict(JobState.PREEMPTED, reason(ReasonCode.EVICTED, message), exit))


def unwanted(seen: Observation | None) -> Ended | None:
    """Return the end of the run if the event shows that the run is no longer wanted."""
    if isinstance(seen, LeaseLost):
        return stopped("the client that had started this run has disconnected")
    if isinstance(seen, Superseded):
        return stopped(f"the repository accepts no more reports of this attempt: {seen.why}")
    return None


@dataclass(frozen=True)
class Success:
    """A successful end of the job, with the words that describe it.

    subject, achievement: of the sentence that reports it.
    """

    exit: ExitStatus
    subject: str = "the script"
    deed: str = "succeeded"


def by_rule(rule: str, ending: Ending | None, line: str | None) -> Success | None:
    """Return the success by the job's ``exit`` rule; ``None`` if its condition is not met.

    ending: how the VM ended, if it has. line: the console line that matches the rule, if any.
    """
    if rule == POWEROFF and ending is Ending.POWEROFF:
        exit = ExitStatus(code=0, channel=ExitChannel.POWEROFF)
        return Success(exit, "the VM", "powered off by itself")
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
    """Return the outcome of a job whose exit status is known and whose outputs were checked.

    disk: MiB of the job's disk; disk_full: it was full when the script ended. missing: patterns that
    match no output. lacking: outputs that did not arrive, with the reason.
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
        faults += [f"its output {name[:255]!r} was rejected: {why}" for name, why in told]
        faults += [f"{len(lacking) - 3} more were rejected"] if len(lacking) > 3 else []
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
    """Return the outcome of a VM that ended without a report and without meeting its rule.

    panic: the kernel's panic message on the console, if any. rule: the job's ``exit``.
    """
    code, message = _early_end(panic, ready, rule, ending)
    return Verdict(JobState.FAILED, reason(code, with_console(message, last_lines)))


def panicked(cause: str | None) -> tuple[ReasonCode, str]:
    """Return reason code and message for a kernel panic, from the panic message.

    A kernel that misses its timer waited too long for a processor of the node: a transient condition,
    and not the image's fault.
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
            f"the VM {did} before its console had shown a line that matches /{wanted}/"
        )
    if not ready:
        return ReasonCode.BOOT_FAILED, f"the VM {did} before the guest was ready"
    did = _DID.get(ending, "powered off")
    return ReasonCode.NO_EXIT_REPORT, f"the guest {did} without reporting an exit status"


def _no_power_off(ending: Ending) -> tuple[ReasonCode, str]:
    if ending is Ending.RESET:
        return ReasonCode.NO_EXIT_REPORT, "the guest restarted its VM instead of powering off"
    return ReasonCode.GUEST_LOST, "the VM is gone, and it is unknown whether it powered off"


_DID = {Ending.POWEROFF: "powered off", Ending.RESET: "restarted"}
_LOST = {
    Ending.KILLED: "the VM was killed from outside",
    Ending.CRASHED: "the VM crashed: its hypervisor ended with an error",
}


#: Reasons that a full disk of the node can cause, too.
_OF_A_FULL_DISK = {
    ReasonCode.BOOT_FAILED,
    ReasonCode.KERNEL_PANIC,
    ReasonCode.GUEST_LOST,
    ReasonCode.NO_EXIT_REPORT,
}


def with_a_full_disk(verdict: Verdict) -> Verdict:
    """Blame the node, not the job, for a failure while the node's disk was full."""
    if verdict.reason.code not in _OF_A_FULL_DISK:
        return verdict
    message = f"the node's disk was full while the VM ran: {verdict.reason.message}"
    return failed(ReasonCode.NODE_FAILED, message, verdict.exit, unfit=True).verdict


def mended_elsewhere(verdict: Verdict, tries_left: int) -> Verdict:
    """Requeue a job that its node failed, if it has tries left.

    A job with an exit status is run again only if its node failed, not if the service refused its
    outputs.
    """
    code = verdict.reason.code
    if verdict.state is not JobState.FAILED or code not in MENDED_ELSEWHERE or not tries_left:
        return verdict
    if verdict.exit is not None and code is not ReasonCode.NODE_FAILED:
        return verdict
    again = f"{verdict.reason.message}; it is run again, up to {tries_left} times"
    return replace(verdict, state=JobState.PREEMPTED, reason=reason(code, again))


def overdue(rule: str, seconds: int, *, script: bool) -> str:
    """Return the message for a job that exceeded its time limit."""
    if rule == POWEROFF:
        return f"the VM had not powered off after {seconds} s"
    if rule != REPORT:
        wanted = rule.removeprefix(CONSOLE_RULE)
        return f"the console had not shown a line that matches /{wanted}/ after {seconds} s"
    subject = "the script was still running" if script else "the guest had not reported"
    return f"{subject} after {seconds} s"


def with_console(message: str, last_lines: str) -> str:
    """Return a message with the console's last lines below it."""
    return f"{message}; the console's last lines:\n{last_lines}" if last_lines else message
