"""The table of ``vmjobs.cluster.failure_backoff``: no VMs start where they only fail."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from vmjobs.cluster.failure_backoff import (
    LONGEST_PAUSE,
    BackoffState,
    FailureBackoff,
    FailureBackoffs,
    VmFailures,
)
from vmjobs.cluster.vm_state import ClusterVmCode

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
IMAGE = f"sha256:{'1' * 64}"
PAIR, WIDE = FailureBackoff(IMAGE, "n1"), FailureBackoff(IMAGE)
OPEN, CLOSED, HALF_OPEN = BackoffState.OPEN, BackoffState.CLOSED, BackoffState.HALF_OPEN


def failed(
    node: str = "n1", code: ClusterVmCode = ClusterVmCode.BOOT_TIMED_OUT, count: int = 1
) -> VmFailures:
    return VmFailures(node, code, "the guest was not ready within 180 s", count)


def after(guard: FailureBackoff, *failures: VmFailures) -> FailureBackoff:
    for failure in failures:
        guard = guard.after_failure(failure, NOW)
    return guard


NO_NODE_DISK = ClusterVmCode.NODE_FAILED
#: A backoff, the failures, and its state after them.
TABLE: dict[str, tuple[FailureBackoff, list[VmFailures], BackoffState]] = {
    "two failures": (PAIR, [failed(), failed()], OPEN),
    "three": (PAIR, [failed(), failed(), failed()], CLOSED),
    "three that were told of at once": (PAIR, [failed(count=3)], CLOSED),
    "for the node's sake": (PAIR, [failed(code=NO_NODE_DISK, count=3)], CLOSED),
    "for the service's sake": (PAIR, [failed(code=ClusterVmCode.TOKEN_REFUSED, count=9)], OPEN),
    "an image on one node": (WIDE, [failed(count=4)], OPEN),
    "an image five times": (WIDE, [failed(count=4), failed()], CLOSED),
    "an image on two nodes": (WIDE, [failed("n1"), failed("n2")], CLOSED),
    "two nodes that are not able to": (
        WIDE,
        [failed("n1", NO_NODE_DISK, 9), failed("n2", ClusterVmCode.NO_HYPERVISOR, 9)],
        OPEN,
    ),
    "an image that came up some time": (
        WIDE.after_success(),
        [failed("n1", count=9), failed("n2", count=9)],
        OPEN,
    ),
    "a node where it came up some time": (PAIR.after_success(), [failed(count=3)], CLOSED),
}


@pytest.mark.parametrize("case", TABLE, ids=list(TABLE))
def test_what_closes(case: str) -> None:
    guard, failures, state = TABLE[case]
    assert after(guard, *failures).state(NOW) is state


def test_pauses_double_up_to_an_hour_and_begin_anew_after_a_success() -> None:
    guard, present, pauses = after(PAIR, failed(count=3)), NOW, []
    for _ in range(9):
        assert guard.until is not None
        pauses.append((guard.until - present).total_seconds())
        assert guard.state(guard.until - timedelta(seconds=1)) is CLOSED
        assert guard.state(guard.until) is HALF_OPEN
        present = guard.until
        guard = guard.after_failure(failed(), present)
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    opened = guard.after_success()
    assert (opened.state(present), opened.failures) == (OPEN, 0)
    again = opened.after_failure(failed(count=3), present)
    assert again.until == present + timedelta(seconds=60)
    assert guard.reset() == PAIR
    endless = FailureBackoff(IMAGE, "n1", failures=5000, closures=5000, until=NOW)
    assert endless.after_failure(failed(), NOW).until == NOW + LONGEST_PAUSE


def test_failures_meanwhile_do_not_lengthen_a_pause() -> None:
    guard = after(PAIR, failed(count=3))
    later = guard.after_failure(failed(code=ClusterVmCode.KERNEL_PANIC), NOW + timedelta(seconds=30))
    assert (later.until, later.failures, later.code) == (guard.until, 4, ClusterVmCode.KERNEL_PANIC)


def test_who_may_come() -> None:
    """After a pause, one VM at a time may start; where the backoff is open, any VM."""
    pair, later = after(PAIR, failed(count=3)), NOW + timedelta(seconds=61)
    wide = after(WIDE, failed("n1"), failed("n2"))
    for known, present, trying, there, barred in (
        ([], NOW, True, True, None),
        ([pair], NOW, False, False, pair),
        ([pair], later, False, False, None),
        ([pair], later, True, False, None),
        ([pair], later, True, True, pair),
        ([wide], NOW, False, False, wide),
        ([wide], later, False, False, None),
        ([wide], later, True, False, wide),
        ([wide, pair], NOW, False, False, wide),
    ):
        guards = FailureBackoffs(known, present)
        assert guards.blocking(IMAGE, "n1", trying=trying, trying_there=there) == barred
    assert FailureBackoffs([pair], NOW).blocking(IMAGE, "n2", trying=True, trying_there=True) is None


def test_it_says_why_and_until_when() -> None:
    pair = after(PAIR, failed(count=3))
    short = "sha256:111111111111…"
    assert pair.describe(NOW) == (
        f"n1: 3 VMs of {short} failed there in a row, last: BOOT_TIMED_OUT the guest was not "
        "ready within 180 s; next try at 12:01:00 UTC"
    )
    assert pair.describe(NOW + timedelta(hours=1)).endswith("; now one is tried at a time")
    assert pair.after_success().describe(NOW) == f"n1: VMs of {short} may start again"
    wide = after(WIDE, failed("n1"), failed("n2"))
    assert wide.describe(NOW).startswith(
        f"2 VMs of {short} failed on n1, n2, and none ever came up, last: BOOT_TIMED_OUT"
    )
    assert wide.reset().describe(NOW) == f"VMs of {short} may start again"
    long = VmFailures("n1", ClusterVmCode.BOOT_FAILED, "a" * 5000 + "\nmore", 3)
    assert len(after(PAIR, long).describe(NOW)) < 400
