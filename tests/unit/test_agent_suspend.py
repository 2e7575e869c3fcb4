"""Detection of a stopped job process: by a signal, or by its frozen cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from vmjobs.agent.run.suspend import ClientProcess


@pytest.mark.parametrize(
    ("state", "frozen", "stopped"),
    [("S", "0", False), ("T", "0", True), ("S", "1", True), ("R", None, False), ("T", None, True)],
)
def test_a_signal_or_a_frozen_cgroup(
    tmp_path: Path, state: str, frozen: str | None, stopped: bool
) -> None:
    process = tmp_path / "proc" / "7"
    process.mkdir(parents=True)
    (process / "stat").write_text(f"7 (a) T b) {state} 1 1")
    if frozen is not None:
        (process / "cgroup").write_text("1:name=x:/y\n0::/condor/slot1\n")
        group = tmp_path / "cgroup" / "condor" / "slot1"
        group.mkdir(parents=True)
        (group / "cgroup.events").write_text(f"populated 1\nfrozen {frozen}\n")
    asking = ClientProcess(7, tmp_path / "proc", tmp_path / "cgroup")
    assert asking.stopped() is stopped
    asking.close()


def test_a_process_that_is_gone(tmp_path: Path) -> None:
    assert not ClientProcess(7, tmp_path, tmp_path).stopped()
