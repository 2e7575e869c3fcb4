"""Outcomes of runs: pure functions from the observed end of a run to the job's outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from vmjobs.agent.vm.events import LeaseLost, RunEvent, RunSuperseded
from vmjobs.agent.vm.vm_failures import VmFailure, hypervisor_failure, image_failure, node_failure
from vmjobs.errors import Conflict, DigestMismatch, HypervisorError, NotFound, Unavailable, VMJobsError
from vmjobs.hypervisor.base import ShutdownCause
from vmjobs.model import (
    CONSOLE_RULE,
    POWEROFF,
    REPORT,
    RETRYABLE,
    ExitChannel,
    ExitStatus,
    JobState,
    Reason,
    ReasonCode,
    reason,
)

#: The signal (``kill_sig``) that HTCondor sends to a job that is vacated, held or removed.
#: (For a job that also has a ``remove_kill_sig``, HTCondor 23.9.6 sends that in every case.)
VACATE_SIGNAL = 15
#: Signals that mean "stop": the script gets them, and a grace period after them.
STOP_SIGNALS = frozenset({2, 3, VACATE_SIGNAL})
#: Exit status of ``vmjobs exec`` and ``vmjobs run`` if there is no script status to pass on.
#: (Like env(1) and nice(1), which use 125 for their own failures.)
NO_EXIT_STATUS = 125


@dataclass(frozen=True)
class RunOutcome:
    """A run's outcome: the job's next state, the reason, and the script's exit status, if any.

    node_at_fault: the node is at fault, and would fail any other job, too.
    image_unbootable: no hypervisor of this node boots the job's image.
    """

    state: JobState
    reason: Reason
    exit: ExitStatus | None = None
    node_at_fault: bool = False
    image_unbootable: bool = False

    @property
    def exit_code(self) -> int:
        """The exit status of ``vmjobs exec``: the script's, but never 0 for a failed job."""
        if self.state is JobState.COMPLETED:
            return 0
        code = self.exit.shell_code if self.exit else NO_EXIT_STATUS
        return code or NO_EXIT_STATUS


class RunEnded(Exception):
    """Raised inside a run to end it with an outcome."""

    def __init__(self, outcome: RunOutcome) -> None:
        super().__init__(outcome.reason.message)
        self.outcome = outcome


def run_failed(
    code: ReasonCode, message: str, exit: ExitStatus | None = None, *, node_at_fault: bool = False
) -> RunEnded:
    return RunEnded(RunOutcome(JobState.FAILED, reason(code, message), exit, node_at_fault))


def run_unbootable(message: str) -> RunEnded:
    """Return the end of a run whose image no hypervisor of this node boots."""
    why = reason(ReasonCode.NO_HYPERVISOR, message)
    return RunEnded(RunOutcome(JobState.FAILED, why, image_unbootable=True))


def image_failed(error: Exception) -> RunEnded:
    """Return the end of a run whose image, or a part of it, could not be fetched."""
    return _ended_by(image_failure(error))


def _ended_by(failure: VmFailure) -> RunEnded:
    return run_failed(failure.code, failure.message, node_at_fault=failure.node_at_fault)


def run_stopped(message: str, exit: ExitStatus | None = None) -> RunEnded:
    """Return the end of a run that was stopped from outside, by a caller that knows the cause."""
    return RunEnded(RunOutcome(JobState.PREEMPTED, reason(ReasonCode.EVICTED, message), exit))


def outcome_of_error(error: VMJobsError) -> RunOutcome:
    if isinstance(error, Conflict):
        return run_stopped(error.message).outcome
    if isinstance(error, HypervisorError):
        return _ended_by(hypervisor_failure(error)).outcome
    if isinstance(error, NotFound | Unavailable | DigestMismatch):
        return run_failed(ReasonCode.INPUT_UNAVAILABLE, error.message).outcome
    return run_failed(ReasonCode.INTERNAL, error.message).outcome


def outcome_of_node_error(error: OSError) -> RunOutcome:
    return _ended_by(node_failure(error)).outcome


def run_unwanted(seen: RunEvent | None) -> RunEnded | None:
    """Return the end of the run if the event shows that the run is no longer wanted."""
    if isinstance(seen, LeaseLost):
        return run_stopped("the client that had started this run has disconnected")
    if isinstance(seen, RunSuperseded):
        return run_stopped(f"the repository accepts no more reports of this attempt: {seen.why}")
    return None


@dataclass(frozen=True)
class Success:
    """A successful end of the job, with the words that describe it.

    subject, achievement: of the sentence that reports it.
    """

    exit: ExitStatus
    subject: str = "the script"
    achievement: str = "succeeded"


def success_by_rule(
    rule: str, shutdown_cause: ShutdownCause | None, line: str | None
) -> Success | None:
    """Return the success by the job's ``exit`` rule; ``None`` if its condition is not met.

    shutdown_cause: how the VM ended, if it has. line: the console line that matches the rule, if any.
    """
    if rule == POWEROFF and shutdown_cause is ShutdownCause.POWEROFF:
        exit = ExitStatus(code=0, channel=ExitChannel.POWEROFF)
        return Success(exit, "the VM", "powered off by itself")
    if line is not None:
        exit = ExitStatus(code=0, channel=ExitChannel.CONSOLE)
        return Success(exit, "the console", f"showed the line {line.strip()[:200]!r}")
    return None


def outcome_of_exit(
    success: Success,
    *,
    disk_full: bool,
    too_large: bool,
    missing: Sequence[str],
    lacking: Mapping[str, str],
    disk: int,
) -> RunOutcome:
    """Return the outcome of a job whose exit status is known and whose outputs were checked.

    disk: MiB of the job's disk; disk_full: it was full when the script ended. missing: patterns that
    match no output. lacking: outputs that did not arrive, with the reason.
    """
    exit, subject = success.exit, success.subject
    if (not exit.ok and disk_full) or too_large:
        message = f"the job wrote more than its disk of {disk} MiB; ask for more with --disk"
        return run_failed(ReasonCode.OUTPUT_TOO_LARGE, message, exit).outcome
    if exit.signal is not None:
        message = f"{subject} was killed by signal {exit.signal}"
        return run_failed(ReasonCode.SCRIPT_KILLED, message, exit).outcome
    if not exit.ok:
        message = f"{subject} exited with status {exit.code}"
        return run_failed(ReasonCode.SCRIPT_FAILED, message, exit).outcome
    how = f"{subject} {success.achievement}"
    if missing or lacking:
        faults = [f"left nothing that matches {', '.join(missing)}"] if missing else []
        told = islice(lacking.items(), 3)
        faults += [f"its output {name[:255]!r} was rejected: {why}" for name, why in told]
        faults += [f"{len(lacking) - 3} more were rejected"] if len(lacking) > 3 else []
        message = f"{how} but {'; '.join(faults)}"
        return run_failed(ReasonCode.OUTPUT_MISSING, message, exit).outcome
    return RunOutcome(JobState.COMPLETED, reason(ReasonCode.SUCCEEDED, how), exit)


#: Reasons that a full disk of the node can cause, too.
_DISK_FULL_REASONS = {
    ReasonCode.BOOT_FAILED,
    ReasonCode.KERNEL_PANIC,
    ReasonCode.GUEST_LOST,
    ReasonCode.NO_EXIT_REPORT,
}


def blame_full_disk(outcome: RunOutcome) -> RunOutcome:
    """Blame the node, not the job, for a failure while the node's disk was full."""
    if outcome.reason.code not in _DISK_FULL_REASONS:
        return outcome
    message = f"the node's disk was full while the VM ran: {outcome.reason.message}"
    return run_failed(ReasonCode.NODE_FAILED, message, outcome.exit, node_at_fault=True).outcome


def requeue_if_retryable(outcome: RunOutcome, tries_left: int) -> RunOutcome:
    """Requeue a job that its node failed, if it has tries left.

    A job with an exit status is run again only if its node failed, not if the service refused its
    outputs.
    """
    code = outcome.reason.code
    if outcome.state is not JobState.FAILED or code not in RETRYABLE or not tries_left:
        return outcome
    if outcome.exit is not None and code is not ReasonCode.NODE_FAILED:
        return outcome
    again = f"{outcome.reason.message}; it is run again, up to {tries_left} times"
    return replace(outcome, state=JobState.PREEMPTED, reason=reason(code, again))


def timeout_message(rule: str, seconds: int, *, script: bool) -> str:
    if rule == POWEROFF:
        return f"the VM had not powered off after {seconds} s"
    if rule != REPORT:
        wanted = rule.removeprefix(CONSOLE_RULE)
        return f"the console had not shown a line that matches /{wanted}/ after {seconds} s"
    subject = "the script was still running" if script else "the guest had not reported"
    return f"{subject} after {seconds} s"
