"""How runs end: the table, and what the console tells."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from reports_kit import ended

from vmjobs.agent.console import ConsoleReader, last_lines, panic_text
from vmjobs.agent.inbox import ExitReported, Ready, ScriptEnded
from vmjobs.agent.run import _verdict_of
from vmjobs.agent.verdict import (
    NO_STATUS,
    Verdict,
    by_rule,
    failed,
    is_of_the_node,
    judge,
    judge_early_end,
    mended_elsewhere,
    overdue,
    stopped,
    with_a_full_disk,
)
from vmjobs.errors import HypervisorError, StorageFull
from vmjobs.hypervisor.base import Ending
from vmjobs.model import MENDED_ELSEWHERE, ExitChannel, ExitStatus, JobState, ReasonCode


def judged(exit: ExitStatus, **facts: Any) -> Verdict:
    nothing: dict[str, Any] = {"disk_full": False, "too_large": False, "missing": [], "disk": 10}
    return judge(exit, **{**nothing, **facts})


@pytest.mark.parametrize(
    ("exit", "facts", "code", "exit_code"),
    [
        (ended(0), {}, ReasonCode.SUCCEEDED, 0),
        (ended(3), {}, ReasonCode.SCRIPT_FAILED, 3),
        (ended(3), {"missing": ["a"]}, ReasonCode.SCRIPT_FAILED, 3),
        (ended(signal=9), {}, ReasonCode.SCRIPT_KILLED, 137),
        (ended(0), {"missing": ["a"]}, ReasonCode.OUTPUT_MISSING, NO_STATUS),
        (ended(0), {"missing": ["a"], "too_large": True}, ReasonCode.OUTPUT_TOO_LARGE, NO_STATUS),
        (ended(1), {"disk_full": True}, ReasonCode.OUTPUT_TOO_LARGE, 1),
        (ended(0), {"disk_full": True}, ReasonCode.SUCCEEDED, 0),
    ],
)
def test_verdicts(exit: ExitStatus, facts: dict[str, Any], code: ReasonCode, exit_code: int) -> None:
    verdict = judged(exit, **facts)
    assert verdict.reason.code is code
    assert verdict.state is (JobState.COMPLETED if code is ReasonCode.SUCCEEDED else JobState.FAILED)
    assert verdict.exit_code == exit_code
    assert verdict.exit == exit


def test_a_job_whose_outputs_did_not_all_arrive_has_failed() -> None:
    lacking = {f"odd\n{number}": "not printable" for number in range(5)}
    verdict = judged(ended(0), lacking=lacking)
    assert (verdict.state, verdict.reason.code) == (JobState.FAILED, ReasonCode.OUTPUT_MISSING)
    assert r"'odd\n0' was rejected: not printable" in verdict.reason.message
    assert verdict.reason.message.endswith("; 2 more were rejected")


R, P, L = "report", "poweroff", "console:all done"
E, C = Ending, ReasonCode


@pytest.mark.parametrize(
    ("rule", "ending", "panic", "ready", "code"),
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
    rule: str, ending: Ending | None, panic: str | None, ready: bool, code: ReasonCode
) -> None:
    verdict = judge_early_end(
        panic=panic, ready=ready, last_lines="line 1\nline 2", rule=rule, ending=ending
    )
    assert (verdict.state, verdict.reason.code) == (JobState.FAILED, code)
    assert verdict.exit is None
    assert verdict.exit_code == NO_STATUS
    assert "line 2" in verdict.reason.message
    if rule == L and code is C.NO_EXIT_REPORT:
        assert "all done" in verdict.reason.message, "it says what never came"


@pytest.mark.parametrize("ending", [None, *Ending])
@pytest.mark.parametrize("rule", [R, P, L])
def test_a_power_off_counts_under_its_rule_alone(rule: str, ending: Ending | None) -> None:
    success = by_rule(rule, ending, None)
    if (rule, ending) == (P, E.POWEROFF):
        assert success is not None
        assert success.exit == ExitStatus(code=0, channel=ExitChannel.POWEROFF)
    else:
        assert success is None


def test_a_line_counts_and_is_quoted() -> None:
    success = by_rule(L, None, "all done")
    assert success is not None
    verdict = judged(success.exit, subject=success.subject, deed=success.deed)
    assert verdict.state is JobState.COMPLETED
    assert verdict.exit == ExitStatus(code=0, channel=ExitChannel.CONSOLE)
    assert "'all done'" in verdict.reason.message


def test_what_was_not_done_in_time() -> None:
    assert "powered off" in overdue(P, 5, script=False)
    assert "/all done/" in overdue(L, 5, script=False)
    assert "script" in overdue(R, 5, script=True)
    assert "script" not in overdue(R, 5, script=False)


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
        Ready(),
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
    path.write_bytes(b"\n".join(b"%d \x1b[31m\xff" % n for n in range(100)))
    shown = last_lines(path, 2)
    assert shown.splitlines()[0].startswith("98 ?[31m")
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
    before = failed(code, "so it was").verdict
    after = with_a_full_disk(before)
    assert (after.state, after.reason.code) == (before.state, blamed)
    assert "so it was" in after.reason.message
    assert ("disk was full" in after.reason.message) == (blamed is ReasonCode.NODE_FAILED)


def test_a_machine_that_finds_no_room_is_not_the_jobs_fault() -> None:
    def verdict(cause: Exception | None) -> ReasonCode:
        error = HypervisorError("cannot lay it out")
        error.__cause__ = cause
        return _verdict_of(error).reason.code

    assert verdict(OSError(errno.ENOSPC, "no room")) is ReasonCode.NODE_FAILED
    assert verdict(OSError(errno.ENOENT, "not there")) is ReasonCode.BOOT_FAILED
    assert verdict(None) is ReasonCode.BOOT_FAILED


@pytest.mark.parametrize("code", sorted(MENDED_ELSEWHERE))
def test_a_job_that_its_node_failed_goes_back_as_often_as_it_may(code: ReasonCode) -> None:
    verdict = failed(code, "the disk is gone").verdict
    again = mended_elsewhere(verdict, 2)
    assert (again.state, again.reason.code) == (JobState.PREEMPTED, code)
    assert again.reason.message == "the disk is gone; it is run again, up to 2 times"
    assert mended_elsewhere(verdict, 0) == verdict


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.ENOMEM, errno.EIO])
def test_what_is_wrong_with_the_node(number: int) -> None:
    try:
        raise HypervisorError("no machine") from OSError(number, "no")
    except HypervisorError as error:
        assert is_of_the_node(error)


@pytest.mark.parametrize(
    "error", [TimeoutError(), ConnectionResetError(), FileExistsError(), StorageFull("too large")]
)
def test_what_whoever_asks_can_bring_about(error: Exception) -> None:
    assert not is_of_the_node(error)


@pytest.mark.parametrize("code", sorted(set(ReasonCode) - MENDED_ELSEWHERE))
def test_any_other_end_is_its_end(code: ReasonCode) -> None:
    verdict = failed(code, "no").verdict
    assert mended_elsewhere(verdict, 4) == verdict


def test_what_was_stopped_from_outside_stays_that() -> None:
    verdict = stopped("gone").verdict
    assert verdict.state is JobState.PREEMPTED
    assert mended_elsewhere(verdict, 4) == verdict
