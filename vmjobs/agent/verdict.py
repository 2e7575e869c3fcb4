"""How a run ended: pure functions from what was seen to the job's outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vmjobs.model import ExitStatus, JobState, Reason, ReasonCode, reason

#: Exit status of ``vmjobs exec`` and ``vmjobs run`` when there is none of the script to pass on.
#: (env(1), nice(1) and their like use 125 for their own failures.)
NO_STATUS = 125


@dataclass(frozen=True)
class Verdict:
    """A run's end: the job's next state, why, and the script's exit status where there is one."""

    state: JobState
    reason: Reason
    exit: ExitStatus | None = None

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


def failed(code: ReasonCode, message: str, exit: ExitStatus | None = None) -> Ended:
    """The end of a run that failed."""
    return Ended(Verdict(JobState.FAILED, reason(code, message), exit))


def stopped(message: str, exit: ExitStatus | None = None) -> Ended:
    """The end of a run that was stopped from outside; whoever stopped it knows what for."""
    return Ended(Verdict(JobState.PREEMPTED, reason(ReasonCode.EVICTED, message), exit))


def judge(
    exit: ExitStatus, *, disk_full: bool, too_large: bool, missing: Sequence[str], disk: int
) -> Verdict:
    """The outcome of a script that ended and whose outputs have been looked at.

    disk: MiB that the job had; disk_full: it was used up when the script ended.
    """
    if (not exit.ok and disk_full) or too_large:
        message = f"the job wrote more than its disk of {disk} MiB; ask for more with --disk"
        return Verdict(JobState.FAILED, reason(ReasonCode.OUTPUT_TOO_LARGE, message), exit)
    if exit.signal is not None:
        message = f"the script was killed by signal {exit.signal}"
        return Verdict(JobState.FAILED, reason(ReasonCode.SCRIPT_KILLED, message), exit)
    if not exit.ok:
        message = f"the script exited with status {exit.code}"
        return Verdict(JobState.FAILED, reason(ReasonCode.SCRIPT_FAILED, message), exit)
    if missing:
        message = f"the script succeeded but left nothing that matches {', '.join(missing)}"
        return Verdict(JobState.FAILED, reason(ReasonCode.OUTPUT_MISSING, message), exit)
    return Verdict(JobState.COMPLETED, reason(ReasonCode.SUCCEEDED, "the script succeeded"), exit)


def judge_early_end(*, panic: str | None, ready: bool, last_lines: str) -> Verdict:
    """The outcome of a machine that ended without an exit status."""
    if panic is not None:
        code, message = (
            ReasonCode.KERNEL_PANIC,
            f"the guest's kernel panicked: {panic or 'no cause given'}",
        )
    elif ready:
        code = ReasonCode.NO_EXIT_REPORT
        message = "the guest powered off without reporting an exit status"
    else:
        code = ReasonCode.BOOT_FAILED
        message = "the machine ended before the guest was ready"
    return Verdict(JobState.FAILED, reason(code, with_console(message, last_lines)))


def with_console(message: str, last_lines: str) -> str:
    """A message with the console's last lines below it."""
    return f"{message}; the console's last lines:\n{last_lines}" if last_lines else message
