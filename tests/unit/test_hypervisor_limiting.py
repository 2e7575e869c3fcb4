"""Resource limits of VMs: arithmetic and decisions, with a simulated clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.waiting import Clock
from vmjobs.hypervisor.base import VmLimits
from vmjobs.hypervisor.sandbox.bubblewrap import ResourceLimits
from vmjobs.hypervisor.sandbox.cgroup import Delegation, find_delegation
from vmjobs.hypervisor.sandbox.cpu_throttle import BURST_SECONDS, PERIOD, CpuAllowance
from vmjobs.hypervisor.sandbox.limit_enforcement import (
    LimitPlan,
    LimitSupport,
    plan_limits,
    resource_limit_settings,
)


def use(share: float, greed: float, seconds: float, late: float = 0.0) -> float:
    """Return the mean number of CPUs of a VM that uses ``greed`` CPUs whenever it runs.

    late: seconds by which each step comes too late.
    """
    clock = Clock()
    allowance, used, end = CpuAllowance(share, clock), 0.0, clock.now + seconds
    while clock.now < end:
        next_step = allowance.next_step(used)
        assert next_step.seconds > 0
        clock.now += next_step.seconds + late
        used += greed * (next_step.seconds + late) if next_step.runs else 0.0
    return used / seconds


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3, 0.95, 2.0])
@pytest.mark.parametrize("late", [0.0, 0.02])
def test_a_greedy_vm_gets_its_share(share: float, late: float) -> None:
    assert use(share, 4.0, 60, late) == pytest.approx(share, rel=0.1, abs=0.002)


def test_a_modest_vm_is_never_halted() -> None:
    assert use(0.3, 0.25, 60) == pytest.approx(0.25, rel=0.01)


def test_what_was_used_before_is_free_and_a_rest_is_a_period_and_the_debt(clock: Clock) -> None:
    allowance = CpuAllowance(0.5, clock)
    assert allowance.next_step(1000.0).runs
    next_step = allowance.next_step(1000.0 + 0.5 * BURST_SECONDS + 0.2)
    assert not next_step.runs
    assert next_step.seconds == pytest.approx(PERIOD + 0.4)


def test_a_rest_saves_no_more_than_the_burst(clock: Clock) -> None:
    allowance = CpuAllowance(0.5, clock)
    allowance.next_step(0.0)
    clock.now += 60
    assert not allowance.next_step(0.5 * BURST_SECONDS).runs


def test_processes_that_vanish_earn_nothing(clock: Clock) -> None:
    """The CPU time of a child is missing for a moment after its end."""
    allowance = CpuAllowance(0.5, clock)
    allowance.next_step(10.0)
    allowance.next_step(10.2)
    allowance.next_step(4.0)
    assert allowance.next_step(10.2).runs
    assert not allowance.next_step(10.2 + 0.5 * BURST_SECONDS).runs


GROUPS = Delegation(Path("/sys/fs/cgroup/x"), frozenset({"cpu", "io"}))
WITH = LimitSupport(GROUPS, nice=0, lowest=0)
WITHOUT = LimitSupport(None, nice=0, lowest=0)
LIMITS = VmLimits(cpu_percent=30, cpu_weight=50, disk_bytes=1000)


def test_with_a_cgroup_all_is_held_by_it() -> None:
    assert plan_limits(LIMITS, 2, WITH, ["8:0", "8:0"]) == LimitPlan(
        settings=(
            ("cpu.max", "60000 100000"),
            ("cpu.weight", "50"),
            ("io.max", "8:0 rbps=1000 wbps=1000"),
        )
    )


def test_with_a_cgroup_no_vm_gets_beyond_its_bounds() -> None:
    bounds = ResourceLimits(memory=1000, cpus=3, address=2000, file=3000, processes=40)
    full = LimitSupport(Delegation(Path("/x"), frozenset({"cpu", "memory", "pids"})), nice=0, lowest=0)
    assert dict(resource_limit_settings(bounds, full)) == {
        "memory.max": "1000",
        "pids.max": "40",
        "cpu.max": "300000 100000",
    }
    assert dict(resource_limit_settings(bounds, WITH)) == {"cpu.max": "300000 100000"}
    assert resource_limit_settings(bounds, WITHOUT) == ()


def test_without_one_a_process_and_nice_levels_do_it_and_disks_are_told_of() -> None:
    found = plan_limits(LIMITS, 2, WITHOUT, ["8:0"])
    assert (found.settings, found.processors, found.nice) == ((), 0.6, 3)
    (said,) = found.unenforced
    assert "disks is not limited" in said
    assert "delegated cgroup" in said


def test_disks_on_no_device_are_told_of_unless_the_hypervisor_limits_them() -> None:
    limits = VmLimits(disk_bytes=1000)
    for devices in ([""], ["8:0", ""]):
        found = plan_limits(limits, 1, WITH, devices)
        assert found.settings == ()
        assert "not all lie on a disk of the node" in "".join(found.unenforced)
    assert plan_limits(limits, 1, WITHOUT, None) == LimitPlan()


NICE = {1: 19, 10: 10, 50: 3, 100: 0, 200: -3, 1000: -10, 10000: -20}


@pytest.mark.parametrize(
    ("weight", "nice", "lowest", "level", "said"),
    [
        *[(weight, 0, -20, level, "") for weight, level in NICE.items()],
        (200, 0, 0, 0, "cpu_weight 200 is not enforced"),
        (200, 0, -2, -2, "only as far as nice level -2"),
        (10, 5, 5, 15, ""),
        (10, 15, 15, 19, "only as far as nice level 19"),
        (10, 19, 19, 19, "cpu_weight 10 is not enforced"),
        (100, 19, 19, 19, ""),
    ],
)
def test_nice_levels_of_weights(weight: int, nice: int, lowest: int, level: int, said: str) -> None:
    found = plan_limits(VmLimits(cpu_weight=weight), 1, LimitSupport(None, nice, lowest), None)
    assert found.nice == level
    assert said in "".join(found.unenforced)
    assert bool(said) == bool(found.unenforced)


def test_a_group_that_nobody_delegated_is_left_alone(tmp_path: Path) -> None:
    group = tmp_path / "system.slice" / "ssh.service"
    group.mkdir(parents=True)
    (group / "cgroup.controllers").write_text("cpu io memory")
    (tmp_path / "cgroup").write_text("0::/system.slice/ssh.service\n")
    (tmp_path / "mountinfo").write_text(f"30 20 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    assert find_delegation(tmp_path) is None
    (tmp_path / "cgroup").write_text("4:memory:/x\n")
    assert find_delegation(tmp_path) is None
