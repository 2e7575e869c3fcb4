"""Machines that boot by what is on their disk: BIOS and UEFI, under every hypervisor that can."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from firmware_guest import bios_disk, uefi_disk
from hypervisor_guest import kernel_tree
from hypervisor_host import said, wait_until

from vmjobs.errors import HypervisorError, NoHypervisor
from vmjobs.hypervisor import firmware
from vmjobs.hypervisor.base import BootImage, DataDisk, Ending, Hypervisor, Machine, MachineState
from vmjobs.hypervisor.libvirt import Libvirt, node_connection
from vmjobs.hypervisor.uml import UserModeLinux
from vmjobs.model import HypervisorKind

#: Seconds that firmware may take on a slow machine.
BOOT = 120.0

Disk = Callable[[Path, str, str], BootImage]


@dataclass
class Bench:
    driver: Hypervisor
    directory: Path
    names: list[str] = field(default_factory=list)

    def machine(self, image: BootImage) -> Machine:
        name = f"vmjobs-test-{secrets.token_hex(6)}"
        self.names.append(name)
        workdir = self.directory / name
        workdir.mkdir()
        data = self.directory / f"{name}.data"
        data.write_bytes(b"\0" * (1 << 20))
        disks = (DataDisk(data, read_only=True), DataDisk(data, read_only=True))
        console = self.directory / f"{name}.console"
        return Machine(name, 1, 256, image, disks, console, workdir)


@pytest.fixture(scope="module", params=[HypervisorKind.QEMU, HypervisorKind.KVM])
def driver(request: pytest.FixtureRequest) -> Hypervisor:
    kernels = lambda: (kernel_tree() / "boot").glob("vmlinuz-*")  # noqa: E731
    found = Libvirt(request.param, node_connection(), kernels=kernels)
    result = found.probe(90)
    if not result.works:
        pytest.skip(f"{request.param}: {result.detail}")
    assert "UEFI" in result.version
    return found


@pytest.fixture
def bench(driver: Hypervisor, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(driver, tmp_path)
    yield bench
    for name in bench.names:  # others run machines at the same time
        driver.destroy(name)


@pytest.mark.parametrize("disk", [bios_disk, uefi_disk])
@pytest.mark.parametrize(("do", "ending"), [("poweroff", Ending.POWEROFF), ("reset", Ending.RESET)])
def test_a_disk_boots_by_itself(bench: Bench, disk: Disk, do: str, ending: Ending) -> None:
    image = disk(bench.directory / "disk", "the disk speaks", do)
    digest = hashlib.sha256(image.root.read_bytes()).hexdigest()
    machine = bench.machine(image)
    bench.driver.start(machine)
    assert bench.driver.wait(machine.name, BOOT) is MachineState.GONE, said(machine.console)
    assert bench.driver.ending(machine.name) is ending
    assert said(machine.console).count("the disk speaks") == 1
    bench.driver.destroy(machine.name)
    assert hashlib.sha256(image.root.read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("disk", [bios_disk, uefi_disk])
def test_a_disk_that_never_ends_is_killed(bench: Bench, disk: Disk) -> None:
    machine = bench.machine(disk(bench.directory / "disk", "the disk speaks", "hang"))
    bench.driver.start(machine)
    wait_until(lambda: "the disk speaks" in said(machine.console), BOOT, "the disk speaks")
    assert bench.driver.state(machine.name) is MachineState.RUNNING
    bench.driver.destroy(machine.name)
    assert bench.driver.state(machine.name) is MachineState.GONE


def test_a_node_without_uefi_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firmware, "find", lambda: None)
    machine = bench.machine(uefi_disk(bench.directory / "disk", "never", "poweroff"))
    with pytest.raises(NoHypervisor, match="no UEFI firmware on this node"):
        bench.driver.start(machine)
    assert bench.driver.state(machine.name) is MachineState.GONE


@pytest.mark.parametrize("disk", [bios_disk, uefi_disk])
def test_uml_boots_no_disk(tmp_path: Path, disk: Disk) -> None:
    image = disk(tmp_path / "disk", "never", "poweroff")
    driver = UserModeLinux()
    machine = Machine("vmjobs-test-uml", 1, 64, image, (), tmp_path / "console", tmp_path)
    with pytest.raises(HypervisorError, match="cannot boot by"):
        driver.start(machine)
    assert driver.state(machine.name) is MachineState.GONE
