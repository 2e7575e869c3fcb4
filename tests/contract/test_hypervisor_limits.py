"""Limits of VMs, with real guests: their usage is measured from outside."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import hypervisors
from tests.kit.guests import direct_boot_guest, kernel_tree, root_disk_guest
from tests.kit.hypervisor_drivers import patient
from tests.kit.hypervisors import BOOT, Bench, endpoint, said, start_elsewhere
from tests.kit.waiting import wait_until
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import BootImage, DataDisk, VmLimits, VmState
from vmjobs.hypervisor.libvirt.connection import node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.hypervisor.sandbox import bubblewrap, helper_processes
from vmjobs.hypervisor.sandbox.cpu_throttle import processor_seconds
from vmjobs.hypervisor.uml import mconsole
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import HypervisorKind

__all__ = ["patient"]


@pytest.fixture(scope="module")
def uml_guest(tmp_path_factory: pytest.TempPathFactory) -> BootImage:
    return root_disk_guest(tmp_path_factory.mktemp("guest"))


@pytest.fixture
def uml(uml_guest: BootImage, tmp_path: Path, patient: None) -> Iterator[Bench]:
    with hypervisors.bench(UserModeLinux(), uml_guest, tmp_path) as made:
        yield made


@pytest.fixture
def qemu(tmp_path: Path) -> Iterator[Bench]:
    driver = Libvirt(HypervisorKind.QEMU, node_connection())
    image = direct_boot_guest(tmp_path, kernel_tree())
    with hypervisors.bench(driver, image, tmp_path) as made:
        yield made


def processes(name: str) -> list[procs.Process]:
    """The VM's first process."""
    found = [process for process in procs.scan() if name in " ".join(process.argv)]
    return [process for process in found if bubblewrap.is_leader(process)]


def shares(name: str, seconds: float) -> Iterator[float]:
    """Processors that a VM uses on average since now, by the kernel's counters, again and again."""
    (first,) = processes(name)
    pids = [bubblewrap.inner_processes(first)[0].pid, *(one.pid for one in helper_processes.find(name))]
    began, before = time.monotonic(), sum(map(processor_seconds, pids))
    while True:
        threading.Event().wait(seconds)
        yield (sum(map(processor_seconds, pids)) - before) / (time.monotonic() - began)


def share(name: str, seconds: float) -> float:
    return next(shares(name, seconds))


def share_in_time(name: str, seconds: float, least: float, most: float) -> float:
    """Wait for an average in between.

    On a busy host a VM gets less at first, and more where its throttle is late, which makes up for it.
    """
    deadline = time.monotonic() + BOOT
    for found in shares(name, seconds):
        if least < found < most:
            return found
        assert time.monotonic() < deadline, f"it got {found:.2f} processors"
    raise AssertionError


def seconds_of(what: str, console: str) -> float:
    told = re.search(rf"{what}=([\d.]+)-([\d.]+)", console)
    assert told is not None, console
    return float(told[2]) - float(told[1])


def test_a_greedy_vm_keeps_to_its_share_without_its_starter(uml: Bench) -> None:
    limits = VmLimits(cpu_percent=30)
    assert uml.driver.unenforced(limits, uml.directory) == ()
    (told,) = uml.driver.unenforced(VmLimits(disk_bytes=1 << 20), uml.directory)
    assert "disks is not limited" in told
    limited = uml.vm("spin", limits=limits)
    starter = start_elsewhere(limited, uml.driver.kind)
    starter.kill()
    starter.wait()
    free = uml.start("spin", "spinning")
    uml.until(limited, "spinning")
    found = share_in_time(limited.name, 3, 0.2, 0.4)
    # A busy node may lack the capacity for a while.
    wait_until(lambda: share(free.name, 1) > found + 0.05, BOOT, "the free one gets more")
    assert uml.driver.state(limited.name) is VmState.RUNNING


def test_a_limited_vm_is_paused_and_goes_on_limited(uml: Bench) -> None:
    vm = uml.start("spin", "spinning", limits=VmLimits(cpu_percent=30))
    for _ in range(5):  # at any moment of the CPU throttle's
        uml.driver.pause(vm.name)
        uml.driver.pause(vm.name)
        assert uml.driver.state(vm.name) is VmState.PAUSED
        assert share(vm.name, 0.2) < 0.02
        uml.driver.resume(vm.name)
        assert uml.driver.state(vm.name) is VmState.RUNNING
    share_in_time(vm.name, 2, 0.08, 0.45)  # it may be in debt at first
    uml.driver.pause(vm.name)  # the fixture destroys it while paused


def test_a_vm_that_stood_still_though_nobody_heard_so(uml: Bench) -> None:
    """On a busy node a kernel may obey after the driver stopped waiting for its answer."""
    vm = uml.start("count", "count=3")
    (first,) = processes(vm.name)
    kernel = bubblewrap.inner_processes(first)[0]
    for paused in (False, True):
        mconsole.command(kernel.pid, vm.name, "stop", BOOT)
        if paused:
            uml.driver.pause(vm.name)
            assert uml.driver.state(vm.name) is VmState.PAUSED
        uml.driver.resume(vm.name)
        before = said(vm.console)
        wait_until(lambda told=before: said(vm.console) > told, BOOT, "the guest goes on")  # type: ignore[misc]


def test_a_guest_notices_nothing_but_that_it_is_slow(uml: Bench) -> None:
    network = uml.network()
    with endpoint(network):
        text = uml.run("network", limits=VmLimits(cpu_percent=20), network=network)
    assert "small=hello" in text
    assert "uploaded=1048576" in text
    assert "guest: done" in text


def test_the_network_is_as_fast_as_asked_for_each_way(uml: Bench) -> None:
    network = uml.network()
    with endpoint(network) as server:
        server.large = b"x" * 2097152
        text = uml.run("pace", limits=VmLimits(network_bits=8_000_000), network=network)
    for way in ("down", "up"):  # bytes taken for bits would be less than 1.5, too
        assert 1.5 < 2097152 * 8 / 1e6 / seconds_of(way, text) < 9.2, text


def test_a_low_weight_is_a_high_nice_level(uml: Bench) -> None:
    if uml.driver.unenforced(VmLimits(cpu_weight=50), uml.directory):
        pytest.fail("this process is at the highest nice level itself")
    vm = uml.start("spin", "spinning", limits=VmLimits(cpu_weight=50))
    (main,) = processes(vm.name)
    levels = set()
    for pid in {main.pid, *procs.children(main.pid)}:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        levels.add(int(stat[16]))
    own = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[16])
    assert levels == {min(19, own + 3)}


def test_qemu_keeps_to_its_share(qemu: Bench) -> None:
    vm = qemu.vm("spin", limits=VmLimits(cpu_percent=30))
    qemu.driver.start(vm)
    share_in_time(vm.name, 3, 0.2, 0.4)
    qemu.driver.pause(vm.name)
    assert qemu.driver.state(vm.name) is VmState.PAUSED
    assert share(vm.name, 0.5) < 0.05
    qemu.driver.resume(vm.name)


def test_qemu_disks_are_as_fast_as_asked_for(qemu: Bench) -> None:
    scratch = qemu.directory / "scratch"
    scratch.write_bytes(b"\0" * (8 << 20))
    limits = VmLimits(disk_bytes=1 << 20)
    assert qemu.driver.unenforced(limits, qemu.directory) == ()
    vm = qemu.start("write", "writing", limits=limits, disks=(DataDisk(scratch),))
    began = time.monotonic()  # the clock of an emulated guest may be wrong by a multiple
    qemu.until(vm, "written")
    assert 2.5 < time.monotonic() - began < 60  # eight times as long if bytes were taken for bits
