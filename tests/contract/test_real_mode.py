"""KVM through libvirt, also where no kernel boots on ``/dev/kvm``: its guest runs in real mode.

QEMU's own processor runs the same guest, which shows that the guest is right.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import hypervisors
from tests.kit.hypervisors import BOOT, Bench, kill_all, mentioning, said, start_elsewhere
from tests.kit.image_jobs import Node
from tests.kit.real_mode import MARK, real_mode_data, real_mode_disk
from tests.kit.waiting import wait_until
from vmjobs.agent.run.state import Run
from vmjobs.hypervisor.base import (
    BootImage,
    Hypervisor,
    ProbeResult,
    ShutdownCause,
    VmConfig,
    VmLimits,
    VmState,
)
from vmjobs.hypervisor.libvirt.connection import node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.hypervisor.probe import boot_probe
from vmjobs.model import ExitChannel, ExitStatus, HypervisorKind, JobState, ReasonCode

#: Where KVM itself runs in a VM, QEMU may fail to set it up.
HIDDEN = ("arch-capabilities",)
BOTH = pytest.mark.parametrize("driver", [HypervisorKind.KVM, HypervisorKind.QEMU], indirect=True)


@functools.cache
def probed(kind: HypervisorKind) -> tuple[Hypervisor, ProbeResult]:
    found = Libvirt(kind, node_connection(), hidden_features=HIDDEN)
    return found, boot_probe(found, version=lambda: "", deadline=BOOT, by_bios=True)


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Hypervisor:
    kind: HypervisorKind = getattr(request, "param", HypervisorKind.KVM)
    found, result = probed(kind)
    if not result.works:
        pytest.skip(f"{kind}: {result.detail}; so nothing of it is tested here")
    return found


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> BootImage:
    return real_mode_disk(tmp_path_factory.mktemp("real-mode"))


@pytest.fixture
def bench(driver: Hypervisor, image: BootImage, tmp_path: Path) -> Iterator[Bench]:
    with hypervisors.bench(driver, image, tmp_path, memory=64) as made:
        yield made


def vm_that(bench: Bench, do: str, says: str = "", **fields: object) -> VmConfig:
    """Start a VM, and wait until its guest prints these words."""
    vm = bench.vm(disks=real_mode_data(bench.directory, do), **fields)
    bench.driver.start(vm)
    bench.until(vm, says)
    return vm


@BOTH
def test_a_job_reads_its_disk_and_leaves_its_output(
    driver: Hypervisor, image: BootImage, tmp_path: Path
) -> None:
    node = Node(tmp_path, image, {driver.kind: driver})
    ended = node.run(f"{MARK}J 6 times 7", outputs=("answer",), memory=64)
    assert ended.outcome.state is JobState.COMPLETED, ended.outcome.reason.message
    assert ended.outcome.exit == ExitStatus(code=0, channel=ExitChannel.OUTPUT_DISK)
    assert (ended.outputs / "answer").read_bytes().rstrip(b"\0") == f"{MARK}J 6 times 7".encode()
    assert ended.reports[-1].hypervisor is driver.kind
    assert JobState.RUNNING in ended.states, "its guest said that it is ready"
    assert b"guest: done" in ended.console


@pytest.mark.soak
def test_a_vm_that_is_killed_is_no_success(
    driver: Hypervisor, image: BootImage, tmp_path: Path
) -> None:
    def kill(this_run: Run, _lease: object) -> None:
        wait_until(lambda: this_run.console.exists() and "count=2" in said(this_run.console), BOOT)
        kill_all(this_run.choice.vm_name)

    ended = Node(tmp_path, image, {driver.kind: driver}).run(f"{MARK}C", kill, memory=64)
    assert ended.outcome.reason.code is ReasonCode.GUEST_LOST


@pytest.mark.soak
def test_a_restart_is_no_power_off(bench: Bench) -> None:
    vm = vm_that(bench, "R")
    assert bench.end(vm).count("guest: up") == 1, "it booted again"
    assert bench.driver.shutdown_cause(vm.name) is ShutdownCause.RESET


@pytest.mark.soak
def test_pause_resume_and_destroy(bench: Bench) -> None:
    vm = vm_that(bench, "C", "count=3")
    bench.driver.pause(vm.name)
    assert bench.driver.state(vm.name) is VmState.PAUSED
    before = said(vm.console)
    assert bench.driver.wait(vm.name, 1.0) is VmState.PAUSED
    assert said(vm.console) == before
    bench.driver.resume(vm.name)
    wait_until(lambda: len(said(vm.console)) > len(before), BOOT, "the guest goes on")
    bench.driver.destroy(vm.name)
    assert bench.driver.state(vm.name) is VmState.GONE
    assert mentioning(vm.name) == []


@pytest.mark.soak
def test_a_greedy_vm_keeps_to_its_share(bench: Bench) -> None:
    vm = vm_that(bench, "S", "spinning", limits=VmLimits(cpu_percent=30))
    began, before = time.monotonic(), bench.driver.usage(vm.name).cpu_seconds
    wait_until(lambda: bench.driver.usage(vm.name).cpu_seconds > before + 5, BOOT, "it works")
    assert 5 / (time.monotonic() - began) < 0.45


@pytest.mark.soak
def test_a_vm_of_a_killed_agent_is_found(bench: Bench) -> None:
    vm = bench.vm(disks=real_mode_data(bench.directory, "C"))
    starter = start_elsewhere(vm, HypervisorKind.KVM, hidden_features=HIDDEN)
    bench.until(vm, "count=2")
    starter.kill()
    starter.wait()
    before = said(vm.console)
    wait_until(lambda: len(said(vm.console)) > len(before), BOOT, "the guest goes on")
    assert vm.name in bench.driver.list()
    assert bench.driver.wait(vm.name, 0.2) is VmState.RUNNING
    bench.driver.destroy(vm.name)
    assert mentioning(vm.name) == []
