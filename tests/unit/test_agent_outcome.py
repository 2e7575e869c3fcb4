"""Outcomes of runs: the table, and what the console shows."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.kit.reports import ended
from vmjobs.agent.cluster_vms.vm_end import end_by_error
from vmjobs.agent.run.outcome import (
    NO_EXIT_STATUS,
    RunOutcome,
    Success,
    blame_full_disk,
    outcome_of_error,
    outcome_of_exit,
    requeue_if_retryable,
    run_failed,
    run_stopped,
    success_by_rule,
    timeout_message,
)
from vmjobs.agent.vm.console import ConsoleReader, panic_text, with_last_lines
from vmjobs.agent.vm.events import ExitReported, GuestReady, ScriptEnded
from vmjobs.agent.vm.vm_failures import early_end, is_node_fault
from vmjobs.errors import HypervisorError, StorageFull
from vmjobs.hypervisor.base import ShutdownCause
from vmjobs.model import RETRYABLE, ExitChannel, ExitStatus, JobState, ReasonCode


def judged(success: Success, **facts: Any) -> RunOutcome:
    nothing: dict[str, Any] = {"disk_full": False, "too_large": False, "missing": [], "lacking": {}}
    return outcome_of_exit(success, disk=10, **{**nothing, **facts})


@pytest.mark.parametrize(
    ("exit", "facts", "code", "exit_code"),
    [
        (ended(0), {}, ReasonCode.SUCCEEDED, 0),
        (ended(3), {}, ReasonCode.SCRIPT_FAILED, 3),
        (ended(3), {"missing": ["a"]}, ReasonCode.SCRIPT_FAILED, 3),
        (ended(signal=9), {}, ReasonCode.SCRIPT_KILLED, 137),
        (ended(0), {"missing": ["a"]}, ReasonCode.OUTPUT_MISSING, NO_EXIT_STATUS),
        (ended(0), {"missing": ["a"], "too_large": True}, ReasonCode.OUTPUT_TOO_LARGE, NO_EXIT_STATUS),
        (ended(1), {"disk_full": True}, ReasonCode.OUTPUT_TOO_LARGE, 1),
        (ended(0), {"disk_full": True}, ReasonCode.SUCCEEDED, 0),
    ],
)
def test_verdicts(exit: ExitStatus, facts: dict[str, Any], code: ReasonCode, exit_code: int) -> None:
    outcome = judged(Success(exit), **facts)
    assert outcome.reason.code is code
    assert outcome.state is (JobState.COMPLETED if code is ReasonCode.SUCCEEDED else JobState.FAILED)
    assert outcome.exit_code == exit_code
    assert outcome.exit == exit


def test_a_job_whose_outputs_did_not_all_arrive_has_failed() -> None:
    lacking = {f"odd\n{number}": "not printable" for number in range(5)}
    outcome = judged(Success(ended(0)), lacking=lacking)
    assert (outcome.state, outcome.reason.code) == (JobState.FAILED, ReasonCode.OUTPUT_MISSING)
    assert r"'odd\n0' was rejected: not printable" in outcome.reason.message
    assert outcome.reason.message.endswith("; 2 more were rejected")


R, P, L = "report", "poweroff", "console:all done"
E, C = ShutdownCause, ReasonCode


@pytest.mark.parametrize(
    ("rule", "shutdown_cause", "panic", "ready", "code"),
    [
        (R, None, "VFS: no root", False, C.KERNEL_PANIC),
        (R, None, "", True, C.KERNEL_PANIC),
        (R, None, "IO-APIC + timer doesn't work!  Boot with apic=debug", False, C.GUEST_LOST),
        (R, None, None, True, C.NO_EXIT_REPORT),
        (R, None, None, False, C.BOOT_FAILED),
        (R, E.POWEROFF, None, True, C.NO_EXIT_REPORT),
        (R, E.POWEROFF, None, False, C.BOOT_FAILED),
        (R, E.RESET, None, True, C.NO_EXIT_REPORT),
        (R, E.RESET, "VFS", True, C.KERNEL_PANIC),
        (R, E.CRASHED, None, True, C.GUEST_LOST),
        (R, E.KILLED, None, False, C.GUEST_LOST),
        (R, E.UNKNOWN, None, True, C.NO_EXIT_REPORT),
        (P, E.RESET, None, True, C.NO_EXIT_REPORT),
        (P, E.RESET, "VFS", True, C.KERNEL_PANIC),
        (P, E.PANICKED, None, True, C.KERNEL_PANIC),
        (P, E.CRASHED, None, True, C.GUEST_LOST),
        (P, E.KILLED, None, True, C.GUEST_LOST),
        (P, E.UNKNOWN, None, True, C.GUEST_LOST),
        (L, E.POWEROFF, None, True, C.NO_EXIT_REPORT),
        (L, E.RESET, None, False, C.NO_EXIT_REPORT),
        (L, E.PANICKED, "VFS", True, C.KERNEL_PANIC),
        (L, E.KILLED, None, True, C.GUEST_LOST),
    ],
)
def test_an_end_without_a_word_is_never_a_success(
    rule: str, shutdown_cause: ShutdownCause | None, panic: str | None, ready: bool, code: ReasonCode
) -> None:
    failure = early_end(panic=panic, ready=ready, rule=rule, shutdown_cause=shutdown_cause)
    assert failure.code is code
    if rule == L and code is C.NO_EXIT_REPORT:
        assert "all done" in failure.message, "it says what never came"


@pytest.mark.parametrize("shutdown_cause", [None, *ShutdownCause])
@pytest.mark.parametrize("rule", [R, P, L])
def test_a_power_off_counts_under_its_rule_alone(
    rule: str, shutdown_cause: ShutdownCause | None
) -> None:
    success = success_by_rule(rule, shutdown_cause, None)
    if (rule, shutdown_cause) == (P, E.POWEROFF):
        assert success.exit == ExitStatus(code=0, channel=ExitChannel.POWEROFF)
    else:
        assert success is None


def test_a_line_counts_and_is_quoted() -> None:
    success = success_by_rule(L, None, "all done")
    outcome = judged(success)
    assert outcome.state is JobState.COMPLETED
    assert outcome.exit == ExitStatus(code=0, channel=ExitChannel.CONSOLE)
    assert "'all done'" in outcome.reason.message


def test_what_was_not_done_in_time() -> None:
    assert "powered off" in timeout_message(P, 5, script=False)
    assert "/all done/" in timeout_message(L, 5, script=False)
    assert "script" in timeout_message(R, 5, script=True)
    assert "script" not in timeout_message(R, 5, script=False)


def test_sentinel_lines_are_found_however_the_bytes_come(path: Path) -> None:
    reader = ConsoleReader(path, "abc")
    assert reader.read() == []
    seen = []
    text = (
        b"noise\r\nvmjobs:abc:ready\r\nvmjobs:xyz:exit code=0\n"
        b"vmjobs:abc:collecting signal=9 disk=full\nvmjobs:abc:exit code=3\n"
        b"vmjobs:abc:exit code=4 undelivered=yes\n"
    )
    for cut in range(0, len(text), 7):
        with path.open("ab") as file:
            file.write(text[cut : cut + 7])
        seen += reader.read()
    console = ExitChannel.CONSOLE
    assert seen == [
        GuestReady(),
        ScriptEnded(ExitStatus(signal=9, channel=console), disk_full=True),
        ExitReported(ExitStatus(code=3, channel=console)),
        ExitReported(ExitStatus(code=4, channel=console), undelivered=True),
    ]


def test_a_line_that_only_resembles_a_sentinel_is_nothing(path: Path) -> None:
    path.write_bytes(
        b"x vmjobs:abd:ready\nvmjobs:abc:exit\nvmjobs:abc:exit code=x\nvmjobs:abc:exit code=999\n"
    )
    assert ConsoleReader(path, "abc").read() == []


def test_a_panic_is_told_with_its_cause(path: Path, tmp_path: Path) -> None:
    path.write_bytes(
        b"booting\n[ 1.0] Kernel panic - not syncing: VFS: Unable to mount root fs\r\nmore\n"
    )
    assert panic_text(path) == "VFS: Unable to mount root fs"
    assert panic_text(tmp_path / "none") is None
    path.write_bytes(b"Kernel panic - not syncing: \x1b]0;yours\x07\n")
    assert panic_text(path) == "?]0;yours?"


def test_last_lines_show_nothing_unprintable(path: Path) -> None:
    assert with_last_lines("it ended", path) == "it ended"
    path.write_bytes(b"\n".join(b"%d \x1b[31m\xff" % n for n in range(100)))
    shown = with_last_lines("it ended", path, 2)
    assert shown.splitlines()[0] == "it ended; the console's last lines:"
    assert shown.splitlines()[1].startswith("98 ?[31m")
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("code", "blamed"),
    [
        (ReasonCode.KERNEL_PANIC, ReasonCode.NODE_FAILED),
        (ReasonCode.BOOT_FAILED, ReasonCode.NODE_FAILED),
        (ReasonCode.GUEST_LOST, ReasonCode.NODE_FAILED),
        (ReasonCode.SCRIPT_FAILED, ReasonCode.SCRIPT_FAILED),
        (ReasonCode.SUCCEEDED, ReasonCode.SUCCEEDED),
    ],
)
def test_a_full_disk_is_not_the_jobs_fault(code: ReasonCode, blamed: ReasonCode) -> None:
    before = run_failed(code, "so it was").outcome
    after = blame_full_disk(before)
    assert (after.state, after.reason.code) == (before.state, blamed)
    assert "so it was" in after.reason.message
    assert ("disk was full" in after.reason.message) == (blamed is ReasonCode.NODE_FAILED)


def test_a_vm_that_finds_no_room_is_the_nodes_fault_for_a_job_and_for_a_cluster() -> None:
    def outcome(cause: Exception | None) -> ReasonCode:
        error = HypervisorError("cannot lay it out")
        error.__cause__ = cause
        code = outcome_of_error(error).reason.code
        assert end_by_error(error).code == code
        return code

    assert outcome(OSError(errno.ENOSPC, "no room")) is ReasonCode.NODE_FAILED
    assert outcome(OSError(errno.ENOENT, "not there")) is ReasonCode.BOOT_FAILED
    assert outcome(None) is ReasonCode.BOOT_FAILED


@pytest.mark.parametrize("code", sorted(RETRYABLE))
def test_a_job_that_its_node_failed_goes_back_as_often_as_it_may(code: ReasonCode) -> None:
    outcome = run_failed(code, "the disk is gone").outcome
    again = requeue_if_retryable(outcome, 2)
    assert (again.state, again.reason.code) == (JobState.PREEMPTED, code)
    assert again.reason.message == "the disk is gone; it is run again, up to 2 times"
    assert requeue_if_retryable(outcome, 0) == outcome


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.ENOMEM, errno.EIO])
def test_what_is_wrong_with_the_node(number: int) -> None:
    try:
        raise HypervisorError("no machine") from OSError(number, "no")
    except HypervisorError as error:
        assert is_node_fault(error)


@pytest.mark.parametrize(
    "error", [TimeoutError(), ConnectionResetError(), FileExistsError(), StorageFull("too large")]
)
def test_what_whoever_asks_can_bring_about(error: Exception) -> None:
    assert not is_node_fault(error)


@pytest.mark.parametrize("code", sorted(set(ReasonCode) - RETRYABLE))
def test_any_other_end_is_its_end(code: ReasonCode) -> None:
    outcome = run_failed(code, "no").outcome
    assert requeue_if_retryable(outcome, 4) == outcome


def test_what_was_stopped_from_outside_stays_that() -> None:
    outcome = run_stopped("gone").outcome
    assert outcome.state is JobState.PREEMPTED
    assert requeue_if_retryable(outcome, 4) == outcome
