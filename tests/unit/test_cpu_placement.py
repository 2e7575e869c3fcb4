"""On which CPU of a node a VM runs."""

from __future__ import annotations

import os
import subprocess

import pytest

from vmjobs.hypervisor.uml import cpu_placement
from vmjobs.hypervisor.uml.cpu_placement import CpuPlacement, choose, find_better, idle_shares


@pytest.mark.parametrize(
    ("idle", "recent", "vms", "chosen"),
    [
        ({}, {}, {}, 0),
        ({0: 0.1, 1: 0.9, 2: 0.5, 3: 0.2}, {}, {1: 3}, 1),  # three VMs there do nothing
        ({0: 0.9, 1: 1.0, 2: 0.9, 3: 0.9}, {1: 1}, {1: 1}, 0),  # it does not show yet
        ({0: 0.0, 1: 0.01, 2: 0.0, 3: 0.0}, {}, {0: 2, 1: 2, 2: 1, 3: 2}, 2),  # all busy
    ],
)
def test_a_new_vm_gets_the_cpu_with_the_least_load(
    idle: dict[int, float], recent: dict[int, int], vms: dict[int, int], chosen: int
) -> None:
    assert choose({0, 1, 2, 3}, idle, recent, vms) == chosen


@pytest.mark.parametrize(
    ("idle", "recent", "vms", "better"),
    [
        ({0: 0.0, 1: 0.9}, {}, {0: 2}, 1),
        ({0: 0.0, 1: 0.9}, {1: 1}, {0: 2}, None),  # another VM has just moved there
        ({0: 0.0, 1: 0.3}, {}, {0: 2, 1: 1}, None),  # moves cost more than they gain
        ({0: 0.0, 1: 0.0}, {}, {0: 3, 1: 1}, 1),  # all busy: equal shares
        ({0: 0.0, 1: 0.0}, {}, {0: 2, 1: 1}, None),
    ],
)
def test_a_vm_that_waits_moves_to_a_better_cpu_if_there_is_one(
    idle: dict[int, float], recent: dict[int, int], vms: dict[int, int], better: int | None
) -> None:
    assert find_better(0, {0, 1}, idle, recent, vms) == better


def test_there_is_no_better_cpu_than_the_only_one() -> None:
    assert find_better(0, {0}, {0: 0.0}, {}, {0: 9}) is None


def test_idle_shares_come_from_the_difference_of_two_samples() -> None:
    before, after = {0: (100, 1000), 1: (0, 1000)}, {0: (150, 1100), 1: (0, 1100), 2: (5, 10)}
    assert idle_shares(before, after) == {0: 0.5, 1: 0.0}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
def test_all_processes_of_a_vm_that_waits_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The placement knows the CPU from the processes: it is new here, as after the agent's restart."""
    monkeypatch.setattr(cpu_placement, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(cpu_placement, "WAITING_SHARE", 0.0)  # as if it had to wait
    monkeypatch.setattr(cpu_placement, "IDLE_GAP", -2.0)  # and another CPU were idle
    first, *_ = sorted(os.sched_getaffinity(0))
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE) as shell:
        shell.stdout.readline()
        child = subprocess.check_output(["pgrep", "-P", str(shell.pid)], text=True)
        tasks = [shell.pid, int(child)]
        for task in tasks:
            os.sched_setaffinity(task, {first})
        placement = CpuPlacement()
        for _ in range(2):
            placement.rebalance("vmjobs-a", shell.pid)
        moved = [os.sched_getaffinity(task) for task in tasks]
        for task in tasks:
            os.kill(task, 9)
    assert moved in ([{other}] * 2 for other in os.sched_getaffinity(0) - {first})
