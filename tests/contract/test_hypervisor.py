"""The same tests for every hypervisor driver, with real guests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.hypervisor_drivers import KINDS, bench, driver, image, patient
from tests.kit.hypervisors import (
    BOOT,
    Bench,
    ancestors,
    endpoint,
    kill_all,
    mentioning,
    said,
    start_elsewhere,
)
from tests.kit.waiting import wait_until
from vmjobs.agent.cluster_vms.vm_instance import CONSOLE_TICK_SECONDS
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import Hypervisor, ShutdownCause, VmConfig, VmState, VmUsage
from vmjobs.hypervisor.sandbox import helper_processes
from vmjobs.hypervisor.uml import kernel_boot
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import CHECKPOINTABLE_KINDS, MIB, HypervisorKind, NetworkMode

__all__ = ["bench", "driver", "image", "patient"]

#: Seconds within which a VM must be gone after a call of :meth:`Hypervisor.destroy`.
DESTROY = 60.0
#: Least processor seconds of a guest that has worked.
WORK = 1.0

#: Hypervisors that can save VMs; the others report that they cannot.
SAVES = pytest.mark.parametrize(
    "driver", [kind for kind in KINDS if kind in CHECKPOINTABLE_KINDS], indirect=True
)


def test_boots_works_and_powers_off(bench: Bench) -> None:
    """No console output is lost. What it has used is known after its end: in full where the kernel
    counts it; of QEMU, as much as was observed.
    """
    network = bench.network()
    with endpoint(network):
        native = bench.driver.kind is not HypervisorKind.QEMU
        vm = bench.vm("work", f"lines={60 if native else 10}", network=network)
        vm.console.write_text("kept from before\n")
        bench.driver.start(vm)
        assert vm.name in bench.driver.list()
        if bench.driver.kind is not HypervisorKind.UML:
            bench.until(vm, "filled")
            seen = bench.driver.usage
            wait_until(lambda: seen(vm.name).cpu_seconds > WORK, BOOT, "it has worked")
        text = bench.end(vm)
        used = bench.driver.usage(vm.name)
    assert used.cpu_seconds > WORK
    assert MIB * 64 <= used.memory < MIB * (vm.memory + 256)
    assert bench.driver.usage(vm.name) == used, "it is remembered"
    assert bench.driver.state(vm.name) is VmState.GONE
    assert vm.name not in bench.driver.list()
    assert text.startswith("kept from before\n")
    assert "guest: up" in text
    assert "guest: done" in text
    check_ending(bench.driver, vm.name, {ShutdownCause.POWEROFF})


def check_ending(driver: Hypervisor, name: str, expected: set[ShutdownCause]) -> None:
    assert driver.shutdown_cause(name) in expected
    assert driver.shutdown_cause(name) in expected, "it is remembered"
    driver.destroy(name)
    assert driver.shutdown_cause(name) is ShutdownCause.UNKNOWN, "it is forgotten"


@pytest.mark.parametrize(
    ("do", "expected", "words"),
    [
        ("reset", {ShutdownCause.RESET}, ""),
        # Our kernels are told to restart after a panic: QEMU's do, UML's exit.
        (
            "panic",
            {ShutdownCause.RESET, ShutdownCause.PANICKED},
            "Kernel panic - not syncing: Attempted to kill init",
        ),
    ],
)
def test_a_vm_that_does_not_power_off_is_told_from_one_that_does(
    bench: Bench, do: str, expected: set[ShutdownCause], words: str
) -> None:
    vm = bench.vm(do)
    bench.driver.start(vm)
    text = bench.end(vm)
    assert words in text
    assert text.count("guest: up") == 1, "it booted again"
    check_ending(bench.driver, vm.name, expected)


def test_destroy_ends_a_busy_guest_for_good(bench: Bench) -> None:
    vm = bench.start("spin", "spinning")
    bench.driver.stop(vm.name)  # the guest may ignore it
    began = time.monotonic()
    bench.driver.destroy(vm.name)
    assert time.monotonic() - began < DESTROY
    assert bench.driver.state(vm.name) is VmState.GONE
    assert mentioning(vm.name) == []
    assert files_of_libvirt(vm.name) == []
    bench.driver.destroy(vm.name)


@pytest.mark.parametrize("driver", [HypervisorKind.UML], indirect=True)
def test_a_vm_that_lost_the_process_for_its_disks_has_ended(bench: Bench) -> None:
    """Debian's kernel, used where vmjobs' own is missing, has such a process."""
    bench.driver = UserModeLinux(kernel_boot.DEBIAN_KERNEL)
    probed = bench.driver.probe(BOOT)
    if not probed.works and "amx_tile" in Path("/proc/cpuinfo").read_text("ascii", "replace"):
        pytest.skip(f"AMX: Debian's UML kernel 6.1 does not run on such processors: {probed.detail}")
    vm = bench.start("count", "count=1")
    listed = subprocess.check_output(["pgrep", "-f", f"umid={vm.name} "], text=True).split()
    os.kill(max(int(pid) for pid in listed if procs.is_traced(int(pid)) is False), signal.SIGKILL)
    ends_soon(bench, vm)


@pytest.mark.parametrize("driver", [HypervisorKind.UML], indirect=True)
@pytest.mark.parametrize("shared", [False, True])
def test_a_guest_that_several_users_share_is_traced(bench: Bench, shared: bool) -> None:
    """A single job's guest is not: it runs faster, on vmjobs' own kernel."""
    vm = bench.start("count", "count=1", shared=shared)
    assert "Linux version 7" in said(vm.console), "make kernel"
    listed = subprocess.check_output(["pgrep", "-f", f"umid={vm.name} "], text=True).split()
    kernel = max(int(pid) for pid in listed)

    def traced() -> set[bool | None]:
        found = {procs.is_traced(child) for child in procs.children(kernel)}
        return found - {None}  # None: it has ended meanwhile

    wait_until(lambda: traced() == {shared}, what="a new process to be as the others")


@pytest.mark.soak_for("qemu")
def test_a_vm_that_lost_its_way_outside_has_ended(bench: Bench) -> None:
    vm = bench.start("count", "count=1", network=bench.network(NetworkMode.OUTBOUND))
    assert bench.driver.wait(vm.name, 1.0) is VmState.RUNNING
    (carries,) = (p for p in helper_processes.find(vm.name) if p.program == "slirp4netns")
    os.kill(carries.pid, signal.SIGKILL)
    ends_soon(bench, vm)


def ends_soon(bench: Bench, vm: VmConfig) -> None:
    """Check that a VM that lost a process ends: an idle host notices within a second.

    One that is not looked after hangs for ever.
    """
    began = time.monotonic()
    wait_until(
        lambda: bench.driver.wait(vm.name, CONSOLE_TICK_SECONDS) is VmState.GONE, BOOT, "it ends"
    )
    assert time.monotonic() - began < 30
    assert bench.driver.shutdown_cause(vm.name) is ShutdownCause.KILLED


def test_what_never_was_is_gone(bench: Bench) -> None:
    name = "vmjobs-test-never-was"
    assert bench.driver.state(name) is VmState.GONE
    assert bench.driver.wait(name, 10) is VmState.GONE
    bench.driver.stop(name)
    bench.driver.destroy(name)
    for verb in (bench.driver.pause, bench.driver.resume):
        with pytest.raises(HypervisorError, match="does not run"):
            verb(name)


def test_pause_and_resume(bench: Bench) -> None:
    vm = bench.start("count", "count=3")
    began = time.monotonic()
    assert bench.driver.wait(vm.name, 0.5) is VmState.RUNNING
    assert 0.4 < time.monotonic() - began < BOOT
    bench.driver.pause(vm.name)
    assert bench.driver.state(vm.name) is VmState.PAUSED
    assert vm.name in bench.driver.list()
    before = said(vm.console)
    assert bench.driver.wait(vm.name, 1.0) is VmState.PAUSED
    assert said(vm.console) == before
    bench.driver.pause(vm.name)
    for _ in range(2):
        bench.driver.resume(vm.name)
        assert bench.driver.state(vm.name) is VmState.RUNNING
    wait_until(lambda: len(said(vm.console)) > len(before), BOOT, "the guest goes on")
    bench.driver.pause(vm.name)
    bench.driver.destroy(vm.name)
    assert bench.driver.state(vm.name) is VmState.GONE


@pytest.mark.soak_for("False")
@SAVES
@pytest.mark.parametrize("paused", [False, True])
def test_a_vm_that_was_saved_goes_on_where_it_was(bench: Bench, paused: bool) -> None:
    """Its files have other paths then; the data on its disks is kept, too.

    It does not open files that its disk names: an overlay from another node may be forged.
    """
    driver, first = bench.driver, bench.start("count", "count=5")
    assert driver.platform
    if paused:
        driver.pause(first.name)  # it must run after it is restored
    memory = bench.directory / "memory"
    driver.save(first.name, memory)
    assert driver.state(first.name) is VmState.GONE
    assert mentioning(first.name) == []
    driver.destroy(first.name)
    before = counted(first.console)
    overlay = first.workdir / "overlay.qcow2"
    overlay.rename(bench.directory / "aside")
    make = ["qemu-img", "create", "-q", "-f", "qcow2", "-o", f"data_file={bench.directory}/secret"]
    subprocess.run([*make, overlay, "64M"], check=True)
    with pytest.raises(HypervisorError, match="which VM overlays never have"):
        driver.start(replace(first, saved=memory))
    assert driver.state(first.name) is VmState.GONE
    (bench.directory / "aside").rename(overlay)
    second = replace(
        first,
        saved=memory,
        workdir=bench.directory / "elsewhere",
        console=bench.directory / "another.console",
    )
    first.workdir.rename(second.workdir)
    driver.start(second)
    assert driver.state(second.name) is VmState.RUNNING
    wait_until(lambda: len(counted(second.console)) > 5, BOOT, "it goes on")
    driver.destroy(second.name)
    after = counted(second.console)
    assert after == list(range(after[0], after[0] + len(after)))
    assert after[0] in {before[-1] + 1, before[-1] + 2}, "the last line may not have been out yet"
    assert counted(first.console) == before


def counted(console: Path) -> list[int]:
    """Return the numbers that a counting guest has printed, in whole lines."""
    lines = said(console).replace("\r", "").split("\n")[:-1]
    # The kernel may print in the middle of a line.
    return [int(found[1]) for line in lines if (found := re.match(r"count=(\d+)", line))]


@pytest.mark.soak_for("qemu")
def test_saving_what_cannot_be_saved_leaves_it_running(bench: Bench) -> None:
    vm = bench.start("count", "count=3")
    with pytest.raises(HypervisorError):
        bench.driver.save(vm.name, bench.directory / "no-such-directory" / "memory")
    before = counted(vm.console)
    wait_until(lambda: len(counted(vm.console)) > len(before) + 2, BOOT, "the guest goes on")
    with pytest.raises(HypervisorError):
        bench.driver.save("vmjobs-test-never-was", bench.directory / "memory")


@pytest.mark.soak_for("15", "qemu", "uml")  # test_isolation_life.py kills theirs one by one
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_vm_that_is_killed_did_not_power_off(bench: Bench, number: signal.Signals) -> None:
    vm = bench.start("spin", "spinning")
    kill_all(vm.name, number)
    assert bench.driver.wait(vm.name, BOOT) is VmState.GONE
    assert bench.driver.shutdown_cause(vm.name) in {ShutdownCause.KILLED, ShutdownCause.CRASHED}


@pytest.mark.soak_for("qemu")
def test_what_a_vm_has_used_is_seen_while_it_runs(bench: Bench) -> None:
    vm = bench.vm("work", "lines=-1")
    assert bench.driver.usage(vm.name) == VmUsage()
    began = time.monotonic()
    bench.driver.start(vm)
    bench.until(vm, "filled")
    enough = bench.driver.usage(vm.name).cpu_seconds + WORK
    wait_until(lambda: bench.driver.usage(vm.name).cpu_seconds > enough, BOOT, "it has worked")
    then = bench.driver.usage(vm.name)
    assert then.cpu_seconds < (os.cpu_count() or 1) * (time.monotonic() - began)
    assert MIB * 64 <= then.memory < MIB * (vm.memory + 256)
    bench.driver.destroy(vm.name)
    assert bench.driver.usage(vm.name) == VmUsage(), "it is forgotten"


def test_what_cannot_start_leaves_nothing(bench: Bench) -> None:
    """Cases: a name in use, a missing disk, and a file that is no saved VM."""
    driver, vm = bench.driver, bench.vm("count")
    driver.start(vm)
    again = bench.directory / "again"
    again.mkdir()
    with pytest.raises(HypervisorError):
        driver.start(replace(vm, workdir=again))
    assert driver.state(vm.name) is VmState.RUNNING
    driver.destroy(vm.name)  # its disks remain
    saved = bench.directory / "memory"
    saved.write_bytes(bytes(4096))
    with pytest.raises(HypervisorError):
        driver.start(replace(vm, saved=saved))
    assert driver.state(vm.name) is VmState.GONE
    other = bench.vm("hello", image=replace(bench.image, root=bench.directory / "no such file"))
    with pytest.raises(HypervisorError):
        driver.start(other)
        # A kernel may notice only after its start.
        bench.end(other)
        raise HypervisorError("it panicked")
    assert driver.state(other.name) is VmState.GONE
    driver.destroy(other.name)
    assert mentioning(other.name) == []


def test_vm_of_a_killed_starter_is_found(bench: Bench) -> None:
    vm = bench.vm("count")
    starter = start_elsewhere(vm, bench.driver.kind, NetworkMode.OUTBOUND)
    # An agent's supervisor ends all of its descendants.
    family = {p.pid: ancestors(p.pid) for p in procs.scan() if vm.name in " ".join(p.argv)}
    assert family
    assert [pid for pid, above in family.items() if starter.pid in above] == []
    starter.kill()
    starter.wait()
    bench.until(vm, "count=3")
    assert vm.name in bench.driver.list()
    assert bench.driver.state(vm.name) is VmState.RUNNING
    assert bench.driver.wait(vm.name, 0.2) is VmState.RUNNING
    bench.driver.destroy(vm.name)
    assert bench.driver.state(vm.name) is VmState.GONE
    assert mentioning(vm.name) == []


def files_of_libvirt(name: str) -> list[str]:
    """Files that libvirt keeps of a VM, for root and for other users."""
    places = (Path("/run/vmjobs"), Path.home() / ".cache/libvirt", Path.home() / ".config/libvirt")
    return [str(path) for place in places for path in place.rglob(f"*{name}*")]
